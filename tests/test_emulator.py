"""The emulator itself: small kernels with one fault each, and the error that must name it.

The faults are what a GPU lets pass or punishes at random: a missing wait, a missing barrier, an address outside.
"""

import os
import re
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashpatch import emulator, emulator_builds
from flashpatch.problem import Config

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))

CONFIG = Config("faults", "bfloat16", 64, 64, 64, 64, 4)
SHARED = 8192

# `in` holds 64 floats 0, 1, 2, ...; `out` has room for 64. Two warps unless a test says otherwise.
SOURCE = """
#include "ptx_sm80.cuh"
struct P { const float* in; float* out; i32* turn; i32 n; i32 unused; };

DEVICE void copy_in(const P& p) {
  if (thread_index() < 16) cp_async_16(shared_base() + thread_index() * 16, p.in + thread_index() * 4, true);
  cp_async_commit();
}
DEVICE void copy_out(const P& p) { st_global(p.out + thread_index(), ld_shared<float>(shared_base() + thread_index() * 4)); }

KERNEL(64, 1) correct(GRID_CONSTANT P p) {
  copy_in(p);
  cp_async_wait<0>();
  sync_block();
  copy_out(p);
}
KERNEL(64, 1) poison(GRID_CONSTANT P p) { copy_out(p); }
KERNEL(64, 1) no_wait(GRID_CONSTANT P p) {
  copy_in(p);
  sync_block();
  copy_out(p);
}
KERNEL(64, 1) no_commit(GRID_CONSTANT P p) {
  if (thread_index() < 16) cp_async_16(shared_base() + thread_index() * 16, p.in + thread_index() * 4, true);
  cp_async_wait<0>();
  sync_block();
  copy_out(p);
}
KERNEL(64, 1) waits_for_the_older(GRID_CONSTANT P p) {
  copy_in(p);
  cp_async_commit();
  cp_async_wait<1>();
  sync_block();
  copy_out(p);
}
KERNEL(64, 1) waits_for_too_few(GRID_CONSTANT P p) {
  cp_async_commit();
  copy_in(p);
  cp_async_wait<1>();
  sync_block();
  copy_out(p);
}
KERNEL(64, 1) no_barrier(GRID_CONSTANT P p) {
  copy_in(p);
  cp_async_wait<0>();
  copy_out(p);
}
KERNEL(64, 1) zero_fill(GRID_CONSTANT P p) {
  if (thread_index() < 16) cp_async_16(shared_base() + thread_index() * 16, nullptr, false);
  cp_async_commit();
  cp_async_wait<0>();
  sync_block();
  copy_out(p);
}
KERNEL(64, 1) read_then_write(GRID_CONSTANT P p) {
  const u32 mine = shared_base() + thread_index() * 4, other = shared_base() + (63 - thread_index()) * 4;
  st_shared(mine, 1.f);
  sync_block();
  const float x = ld_shared<float>(other);
  if (p.n) sync_block();
  st_shared(mine, x);
}
KERNEL(64, 1) two_writers(GRID_CONSTANT P p) { st_shared(shared_base() + (thread_index() & 31) * 4, 1.f); }
KERNEL(64, 1) halves_of_a_word(GRID_CONSTANT P p) {
  st_shared(shared_base() + thread_index() * 2, (u16)thread_index());
  sync_block();
  st_global(p.out + thread_index(), (float)ld_shared<u16>(shared_base() + thread_index() * 2));
}
KERNEL(64, 1) within_a_warp(GRID_CONSTANT P p) {
  const u32 base = shared_base() + warp_index() * 128;
  st_shared(base + lane_index() * 4, (float)lane_index());
  if (p.n) sync_warp();
  st_global(p.out + thread_index(), ld_shared<float>(base + (lane_index() ^ 1) * 4));
}
KERNEL(64, 1) warp_is_not_block(GRID_CONSTANT P p) {
  st_shared(shared_base() + thread_index() * 4, 1.f);
  sync_warp();
  st_global(p.out + thread_index(), ld_shared<float>(shared_base() + (thread_index() ^ 32) * 4));
}
KERNEL(64, 1) matrix_before_sync(GRID_CONSTANT P p) {
  u32 r[4];
  for (int i = 0; i < 4; ++i) st_shared(shared_base() + warp_index() * 512 + i * 128 + lane_index() * 4, 1u);
  if (p.n) sync_warp();
  ldmatrix_x4(r, shared_base() + warp_index() * 512 + lane_index() * 16);
}
KERNEL(64, 1) shared_offset(GRID_CONSTANT P p) {
  if (thread_index() == 5) st_shared(shared_base() + p.n, 1.f);
}
KERNEL(64, 1) shared_wide(GRID_CONSTANT P p) {
  if (thread_index() == 5) st_shared(shared_base() + p.n, U32x4{0, 0, 0, 0});
}
KERNEL(64, 1) no_base(GRID_CONSTANT P p) { ld_shared<float>(thread_index() * 4); }
KERNEL(64, 1) matrix_rows(GRID_CONSTANT P p) {
  u32 r[4];
  ldmatrix_x4(r, shared_base() + lane_index() * 16 + (lane_index() == 9 ? p.n : 0));
}
KERNEL(64, 1) copy_destination(GRID_CONSTANT P p) { cp_async_16(shared_base() + thread_index() * 16 + 8, p.in, true); }
KERNEL(64, 1) copy_source(GRID_CONSTANT P p) { cp_async_16(shared_base() + thread_index() * 16, p.in + p.n, true); }
KERNEL(64, 1) read_global(GRID_CONSTANT P p) {
  if (thread_index() == 7) st_global(p.out, ld_global(p.in + p.n));
}
KERNEL(64, 1) write_global(GRID_CONSTANT P p) {
  if (thread_index() == 7) st_global(p.out + p.n, 1.f);
}
KERNEL(64, 1) write_input(GRID_CONSTANT P p) { st_global((float*)p.in + thread_index(), 1.f); }
KERNEL(64, 1) null_pointer(GRID_CONSTANT P p) { ld_global((const float*)nullptr + thread_index()); }
KERNEL(64, 1) wide_global(GRID_CONSTANT P p) {
  if (thread_index() == 7) ld_global((const F32x4*)(p.in + p.n));
}
KERNEL(64, 1) different_collectives(GRID_CONSTANT P p) {
  if (lane_index() < 8) shfl_xor(1.f, 1);
  else vote_any(true);
}
KERNEL(64, 1) exited_lanes(GRID_CONSTANT P p) {
  if (lane_index() >= 30) return;
  shfl_xor(1.f, 1);
}
KERNEL(64, 1) different_barriers(GRID_CONSTANT P p) {
  if (lane_index() < 8) sync_block();
  else sync_block_or(true);
}
KERNEL(64, 1) half_at_a_barrier(GRID_CONSTANT P p) {
  if (warp_index() == 0) sync_block();
  else while (ld_acquire_global(p.turn) == 0) {}
}
KERNEL(64, 1) exited_warp(GRID_CONSTANT P p) {
  if (warp_index() == 1) return;
  sync_block();
}
KERNEL(64, 1) barrier_against_shuffle(GRID_CONSTANT P p) {
  if (lane_index() == 3) sync_block();
  else shfl_xor(1, 1);
}
KERNEL(64, 1) takes_turns(GRID_CONSTANT P p) {
  if (thread_index() == 40) st_global(p.out, 5.f), red_release_add_global(p.turn, 1);
  if (thread_index() == 0) {
    while (ld_acquire_global(p.turn) == 0) {}
    st_global(p.out + 1, ld_global_coherent(p.out));
  }
}
KERNEL(64, 1) every_block_stores(GRID_CONSTANT P p) { st_global(p.out + thread_index(), 1.f); }
KERNEL(64, 1) every_block_adds(GRID_CONSTANT P p) { red_add_global(p.out + thread_index(), 1.f); }
KERNEL(64, 1) two_threads_store(GRID_CONSTANT P p) { st_global(p.out + thread_index() / 2, 1.f); }
KERNEL(64, 1) reads_what_it_wrote(GRID_CONSTANT P p) {
  st_global(p.out + thread_index(), 1.f);
  ld_global(p.out + thread_index());
}
KERNEL(64, 1) adds_in_turn(GRID_CONSTANT P p) {
  if (thread_index() == 0) {
    while (ld_acquire_global(p.turn) != (i32)block_index()) {}
  }
  if (p.n != 1) sync_block();
  const float sum = ld_global_coherent(p.out + thread_index());
  st_global(p.out + thread_index(), sum + 1.f);
  if (p.n != 2) sync_block();
  if (thread_index() == 0) red_release_add_global(p.turn, 1);
}
KERNEL(64, 1) never_ends(GRID_CONSTANT P p) {
  for (;;) shfl_xor(1, 1);
}
KERNEL(64, 1) never_meets(GRID_CONSTANT P p) {
  for (;;) st_shared(shared_base() + thread_index() * 4, 1.f);
}
KERNEL(64, 1) not_initialised(GRID_CONSTANT P p) {
  float sums[4];
  for (int i = 0; i < p.n; ++i) sums[i] = 0.f;
  st_global(p.out + thread_index(), sums[lane_index() & 3] + 1.f);
}
KERNEL(64, 1) votes(GRID_CONSTANT P p) {
  const bool any = vote_any(thread_index() == 40), all = vote_all(thread_index() != 40);
  const bool block = sync_block_or(thread_index() == 40);
  st_global(p.out + thread_index(), (float)(any + 2 * all + 4 * block));
}
KERNEL(64, 1) strided(GRID_CONSTANT P p) {
  ld_shared<float>(shared_base() + thread_index() * p.n);
}
KERNEL(64, 1) strided_rows(GRID_CONSTANT P p) {
  u32 r[4];
  ldmatrix_x4(r, shared_base() + lane_index() % 8 * p.n);
}
KERNEL(64, 1) strided_wide(GRID_CONSTANT P p) {
  ld_shared<U32x4>(shared_base() + lane_index() * p.n);
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "faults.cu").write_text(SOURCE)
    return folder


class Run:
    """Launches kernels of SOURCE and keeps what they wrote."""

    def __init__(self, folder, seed=0, config=CONFIG):
        self.kernel = emulator.load(config, folder=folder, seed=seed)
        self.inputs = torch.arange(64, dtype=torch.float32)
        self.out = torch.full((64,), -1.0)
        self.turn = torch.zeros(1, dtype=torch.int32)

    def __call__(self, entry, n=0, *, shared=SHARED, grid=1, threads=64, checked=True):
        params = struct.pack("3Q2i", self.inputs.data_ptr(), self.out.data_ptr(), self.turn.data_ptr(), n, 0)
        tensors = [(self.inputs, "in", False), (self.out, "out", True), (self.turn, "turn", True)]
        ranges = [(t.data_ptr(), t.numel() * 4, name, writable) for t, name, writable in tensors]
        self.kernel.launch(entry, grid, threads, shared, params, tensors=ranges if checked else ())
        return self.out


@pytest.fixture
def run(folder):
    return Run(folder)


def fault(run, entry, n=0, **options):
    """The error of a launch that must fail."""
    with pytest.raises(emulator.EmulationError) as raised:
        run(entry, n, **options)
    return raised.value


def is_race(error, *instructions):
    """Whichever thread came second reports it; both are named."""
    return error.what.startswith("race: ") and all(name in error.what for name in instructions)


# ---- what is right stays right ----


@pytest.mark.parametrize("seed", range(5))
def test_correct_kernels_pass(folder, seed):
    run = Run(folder, seed)
    assert torch.equal(run("correct"), run.inputs)
    assert torch.equal(run("waits_for_the_older"), run.inputs)
    assert torch.equal(run("zero_fill"), torch.zeros(64))
    assert torch.equal(run("halves_of_a_word"), run.inputs)
    assert torch.equal(run("within_a_warp", 1) % 32, torch.arange(64.0).view(32, 2).flip(1).flatten() % 32)
    run("read_then_write", 1)
    run("matrix_before_sync", 1)
    run("exited_warp")
    assert run("takes_turns")[1] == 5
    assert run("votes").tolist() == [4 + 2] * 32 + [4 + 1] * 32


def fills_arrays() -> bool:
    command = emulator_builds.find_compiler(os.environ.get("FLASHPATCH_CXX"))
    return emulator.available() is None and bool(emulator_builds.pattern_flags(command))


def test_shared_memory_starts_as_nan(run):
    assert run("poison").isnan().all()


@pytest.mark.skipif(not fills_arrays(), reason="the compiler has no pattern for this")
def test_uninitialised_accumulators_are_not_zero(run):
    assert (run("not_initialised").abs() > 1e10).all() or run.out.isnan().all()


# ---- order ----


@pytest.mark.parametrize("entry", ["no_wait", "no_commit", "waits_for_too_few"])
def test_copy_without_its_wait(run, entry):
    assert "has not arrived" in fault(run, entry).what


def test_wait_alone_does_not_show_the_copy_to_others(run):
    error = fault(run, "no_barrier")
    assert error.what.startswith("race: ld_shared at shared offset")
    assert "cp_async_16" in error.what


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_write_after_read_needs_a_barrier(folder, seed):
    assert is_race(fault(Run(folder, seed), "read_then_write"), "st_shared", "ld_shared")


def test_two_writers(run):
    assert re.search("race: st_shared .* not ordered after the write by thread", fault(run, "two_writers").what)


def test_lanes_of_a_warp_need_sync_warp(run):
    assert is_race(fault(run, "within_a_warp"), "st_shared", "ld_shared")
    assert is_race(fault(run, "matrix_before_sync"), "st_shared", "ldmatrix_x4")


def test_sync_warp_does_not_order_other_warps(run):
    assert is_race(fault(run, "warp_is_not_block"), "st_shared", "ld_shared")


# ---- order in global memory ----


def test_blocks_that_store_to_the_same_place(run):
    run("every_block_stores")
    what = fault(run, "every_block_stores", grid=2).what
    assert what.startswith("race in global memory: st_global of byte 0 of out") and "of block 0" in what


def test_blocks_may_add_to_the_same_place(run):
    assert run("every_block_adds", grid=3).tolist() == [2.0] * 64


def test_deterministic_kernels_add_in_order(folder):
    run = Run(folder, config=replace(CONFIG, deterministic=True))
    run("every_block_adds")
    assert "red_add_global" in fault(run, "every_block_adds", grid=2).what


def test_turns_order_blocks(run):
    assert run("adds_in_turn", grid=3).tolist() == [2.0] * 64


@pytest.mark.parametrize("n", [1, 2])
def test_turns_need_barriers_around_them(run, n):
    """The thread that waits for the turn, and the one that passes it on, speak for their block only after a barrier."""
    assert "race in global memory" in fault(run, "adds_in_turn", n, grid=3).what


def test_threads_that_store_to_the_same_place(run):
    assert "race in global memory" in fault(run, "two_threads_store").what


def test_read_only_loads_of_written_memory(run):
    assert "cache may be stale" in fault(run, "reads_what_it_wrote").what


# ---- bounds and alignment ----


@pytest.mark.parametrize("n", [SHARED, -4, 1 << 20])
def test_outside_shared_memory(run, n):
    error = fault(run, "shared_offset", n)
    assert f"offset {n}" in error.what and f"outside the launch's {SHARED} bytes" in error.what
    assert (error.kernel, error.entry, error.block, error.thread) == ("faults", "shared_offset", 0, 5)
    run("shared_offset", SHARED - 4)


def test_shared_address_without_its_base(run):
    assert "outside the launch's" in fault(run, "no_base").what


def test_misaligned_shared_memory(run):
    assert "not aligned to 16" in fault(run, "shared_wide", 8).what
    assert "not aligned to 4" in fault(run, "shared_offset", 2).what
    error = fault(run, "matrix_rows", 8)
    assert "not aligned to 16" in error.what and error.thread % 32 == 9
    assert "not aligned to 16" in fault(run, "copy_destination").what
    run("matrix_rows")


@pytest.mark.parametrize("n", [64, -1])
def test_outside_global_memory(run, n):
    error = fault(run, "read_global", n)
    assert "outside every tensor" in error.what and "of in" in error.what and error.thread == 7
    assert "outside every tensor" in fault(run, "write_global", n).what


def test_copy_from_outside(run):
    assert "outside every tensor" in fault(run, "copy_source", 64).what
    assert "not aligned to 16" in fault(run, "copy_source", 1).what


def test_misaligned_global_memory(run):
    assert "not aligned to 16" in fault(run, "wide_global", 2).what
    run("wide_global", 4)


def test_inputs_are_not_written(run):
    assert "writes to in" in fault(run, "write_input").what


def test_null_pointer(run):
    assert "null pointer" in fault(run, "null_pointer", checked=False).what


def test_without_tensors_nothing_is_checked(run):
    run("read_global", 0, checked=False)


# ---- threads with each other ----


def test_divergent_collective(run):
    error = fault(run, "different_collectives")
    assert "divergent warp" in error.what and "shfl_xor" in error.what and "vote" in error.what and "0-7" in error.what


def test_collective_without_exited_lanes(run):
    assert re.search(
        "shfl_xor needs the whole warp, but lanes .*3[01]|lane 3[01] exits", fault(run, "exited_lanes").what
    )


def test_divergent_barrier(run):
    assert "divergent barrier" in fault(run, "different_barriers").what


def test_deadlock_says_who_waits_where(run):
    what = fault(run, "half_at_a_barrier").what
    assert what.startswith("deadlock: threads 0-31 wait in sync_block at faults.cu:")
    assert "threads 32-63 wait in ld_acquire_global at faults.cu:" in what
    assert "threads 3" in fault(run, "barrier_against_shuffle").what


def test_time_limit(run, monkeypatch):
    monkeypatch.setenv("FLASHPATCH_EMULATION_SECONDS", "0.2")
    assert "does not end" in fault(run, "never_ends").what
    assert "does not end" in fault(run, "never_meets").what


def test_launch_again_after_an_error(run):
    for entry in ("no_wait", "no_barrier", "half_at_a_barrier", "different_collectives"):
        fault(run, entry)
        assert torch.equal(run("correct"), run.inputs)


def test_error_names_the_place(run):
    line = SOURCE[: SOURCE.index("if (thread_index() == 7) st_global(p.out + p.n")].count("\n") + 1
    error = fault(run, "write_global", 64)
    assert error.site == f"faults.cu:{line}"
    assert f"write_global of faults, block 0, thread 7 at faults.cu:{line}" in str(error)


# ---- counters ----


@pytest.mark.parametrize(("stride", "passes"), [(4, 1), (8, 2), (16, 4), (128, 32)])
def test_bank_conflicts_of_single_words(run, stride, passes):
    run("strided", stride)
    assert sum(run.kernel.last.bank_conflicts.values()) == 2 * (passes - 1)


@pytest.mark.parametrize(("stride", "passes"), [(16, 1), (32, 2), (128, 8)])
def test_bank_conflicts_of_matrices(run, stride, passes):
    run("strided_rows", stride)
    assert sum(run.kernel.last.bank_conflicts.values()) == 2 * 4 * (passes - 1)


@pytest.mark.parametrize(("stride", "passes"), [(16, 1), (32, 2), (128, 8)])
def test_bank_conflicts_of_wide_accesses(run, stride, passes):
    run("strided_wide", stride)
    assert sum(run.kernel.last.bank_conflicts.values()) == 2 * 4 * (passes - 1)


def test_instruction_counts(run):
    run("correct")
    counts = run.kernel.last.instructions
    assert counts == {"cp_async_16": 16, "sync_block": 64, "ld_shared": 64, "st_global": 64}
    run("votes")
    assert run.kernel.last.instructions == {"vote": 4, "sync_block_or": 64, "st_global": 64}


# ---- launches ----


def test_launch_is_refused(run):
    assert "whole warps" in fault(run, "correct", threads=48).what
    assert "compiled for at most 64" in fault(run, "correct", threads=96).what
    with pytest.raises(ValueError, match="has no kernel 'nothing'"):
        run("nothing")
    with pytest.raises(ValueError, match="takes 32 bytes of params"):
        run.kernel.launch("correct", 1, 64, SHARED, b"1234")


def test_threads_may_launch_at_once(folder):
    runs = [Run(folder) for _ in range(4)]
    threads = [threading.Thread(target=run, args=("correct",)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(run.out, run.inputs) for run in runs)


# ---- arithmetic ----

NUMBERS = """
#include "ptx_sm80.cuh"
struct P { const float* in; u32* packed; float* back; };
KERNEL(64, 1) numbers(GRID_CONSTANT P p) {
  const int i = (int)block_index() * 64 + thread_index();
  const u32 pair = pack<kIsBf16>(ld_global(p.in + 2 * i), ld_global(p.in + 2 * i + 1));
  const F32x2 values = unpack<kIsBf16>(pair);
  st_global(p.packed + i, pair);
  st_global(p.back + 2 * i, values.x);
  st_global(p.back + 2 * i + 1, values.y);
}
"""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_even(tmp_path, dtype):
    (tmp_path / "numbers.cu").write_text(NUMBERS)
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = every.float()
    following = torch.nextafter(exact, torch.tensor(float("inf")))
    halfway = (exact + torch.roll(exact, -1)) / 2
    values = torch.cat([exact, following, halfway, torch.randn(4096), torch.tensor([3e38, -3e38, 1e-45, 65519.9] * 32)])
    values = values[: values.numel() // 128 * 128].contiguous()
    packed, back = torch.empty(values.numel(), dtype=dtype), torch.empty_like(values)
    kernel = emulator.load(Config("numbers", str(dtype).split(".")[1], 64, 64, 64, 64, 2), folder=tmp_path)
    kernel.launch(
        "numbers", values.numel() // 128, 64, 0, struct.pack("3Q", *(t.data_ptr() for t in (values, packed, back)))
    )
    torch.testing.assert_close(packed, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, values.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


# ---- building ----


def functions(text):
    names = re.findall(r"^(?:template <[^>]*> ?\n?)?DEVICE\s+[\w&*]+\s+(\w+)\(", text, re.MULTILINE)
    return set(names) | set(re.findall(r"struct alignas\(\d+\) (\w+)", text))


@pytest.mark.parametrize("header", sorted(path.name for path in (ROOT / "cuda_src").glob("ptx_sm*.cuh")))
def test_every_instruction_has_a_twin(header):
    real = functions((ROOT / "cuda_src" / header).read_text())
    twin = functions((ROOT / "cuda_src" / "emulation" / header).read_text())
    assert len(real) > 10 or header == "ptx_sm75.cuh"
    assert real and real - twin == set()


@pytest.mark.parametrize("folder", ["cuda_src", "cuda_src/emulation"])
def test_turing_has_every_word_that_is_kept_from_it(folder):
    """What ptx_sm80.cuh leaves out for Turing, Turing's own headers have, on the device and in the emulator."""
    text = (ROOT / folder / "ptx_sm80.cuh").read_text()
    guarded = re.findall(r"^#ifndef WORDS_OF_SM75\b(.*?)^#endif\n(?!#endif)", text, re.MULTILINE | re.DOTALL)
    kept = set().union(*map(functions, guarded))
    own = functions((ROOT / folder / "ptx_sm75.cuh").read_text())
    substitutes = functions((ROOT / "cuda_src" / "substitutes_sm75.cuh").read_text())
    assert kept == {"cp_async_16", "cp_async_commit", "cp_async_wait", "mma_m16n8k16", "pack", "red_add_global"}
    assert kept <= own | substitutes and not own & substitutes


def test_no_compiler_is_a_reason(monkeypatch):
    monkeypatch.setenv("FLASHPATCH_CXX", "no-such-compiler")
    reason = emulator.available()
    assert reason.code == "no_compiler" and "no-such-compiler" in reason.text
    monkeypatch.delenv("FLASHPATCH_CXX")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(emulator_builds.importlib.util, "find_spec", lambda name: None)
    emulator_builds.find_compiler.cache_clear()
    reason = emulator.available()
    emulator_builds.find_compiler.cache_clear()
    assert "apt install g++" in reason.text and "pip install ziglang" in reason.text


def test_compiler_errors_are_shown(tmp_path):
    (tmp_path / "broken.cu").write_text(
        '#include "ptx_sm80.cuh"\nKERNEL(32, 1) broken(GRID_CONSTANT Params p) { nonsense(); }\n'
    )
    config = Config("broken", "bfloat16", 64, 64, 64, 64, 1)
    with pytest.raises(emulator.EmulatorBuildError, match=r"broken\.cu:2.*nonsense"):
        emulator.load(config, folder=tmp_path)
    with pytest.raises(emulator.EmulatorBuildError, match=r"no kernel source nothing\.cu"):
        emulator.load(Config("nothing", "bfloat16", 64, 64, 64, 64, 1))


def test_patch_is_part_of_the_key(folder):
    run = Run(folder)
    run.kernel = emulator.load(
        CONFIG, folder=folder, patch=lambda name, text: text.replace("nullptr, false", "p.in, true")
    )
    run("zero_fill")
    assert not torch.equal(run.out, torch.zeros(64))
    assert torch.equal(Run(folder)("zero_fill"), torch.zeros(64))


PROGRAM = """
import sys
from pathlib import Path
from flashpatch import emulator
from flashpatch.problem import Config
emulator.load(Config("faults", "bfloat16", 64, 64, 64, 64, 4), folder=Path(sys.argv[1]))
"""


def test_cache_is_private_and_survives_damage(folder, tmp_path):
    """A damaged entry is rebuilt, an intact one is not; nobody else can put anything there."""
    cache = tmp_path / "cache"
    environment = {**os.environ, "FLASHPATCH_CACHE_DIR": str(cache)}

    def load():
        subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], env=environment, cwd=ROOT, check=True)
        (entry,) = (cache / "emulator").glob("faults-*.so")
        return entry, entry.stat().st_mtime_ns

    entry, built = load()
    assert (cache / "emulator").stat().st_mode & 0o077 == 0
    assert load() == (entry, built)
    content = entry.read_bytes()
    entry.write_bytes(content[: len(content) // 2])
    assert load()[1] != built
    assert entry.read_bytes()[-32:] != content[: len(content) // 2][-32:]


def test_a_finished_launch_keeps_no_stacks(run):
    """A process may hold 65530 mappings: hundreds a kernel, for as many kernels as a test run loads, are too many."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    run("correct")
    guards = [line for line in maps.read_text().splitlines() if " ---p " in line and _bytes(line) == 64 * 1024]
    assert len(guards) < 16


def _bytes(line: str) -> int:
    begin, _, end = line.split()[0].partition("-")
    return int(end, 16) - int(begin, 16)
