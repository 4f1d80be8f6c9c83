"""The Hopper part of the emulator: barriers, copy engine and wgmma, right and with one fault each."""

import re
import struct

import pytest
import torch

from flashpatch import emulator
from flashpatch.problem import Config

pytestmark = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))

CONFIG = Config("hopper", "bfloat16", 64, 64, 64, 64, 8)

# `fault` switches one thing off or on; 0 is right.
SOURCE = """
#include "ptx_sm90.cuh"
struct alignas(64) P { TensorMap a, b, c; const float* in; float* out; i32 fault; i32 row; };

DEVICE u64 descriptor(u32 address, u32 slab) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(slab >> 4) << 16 | (address & 0x3ffff) >> 4;
}
DEVICE void store_products(const P& p, const float (&d)[32]) {
  for (int e = 0; e < 32; ++e)
    st_global(p.out + (warp_index() * 16 + lane_index() / 4 + e / 2 % 2 * 8) * 64 + e / 4 * 8 + lane_index() % 4 * 2 + e % 2, d[e]);
}

// out [64 x 64] = A [64 x 64] B^T or A B, both by TMA.
KERNEL(128, 1) product(GRID_CONSTANT P p) {
  const u32 a = shared_base(), b = a + 8192, barrier = b + 8192;
  if (thread_index() == 0) {
    if (p.fault != 1) mbarrier_init(barrier, 1);
    if (p.fault != 2) fence_mbarrier_init();
  }
  if (p.fault != 3) sync_block();
  if (thread_index() == 0) {
    mbarrier_arrive_expect_tx(barrier, p.fault == 4 ? 16384 + 16 : 16384);
    tma_load_4d(a, &p.a, barrier, 0, p.row, 0, 0);
    tma_load_4d(b + (p.fault == 5 ? 64 : 0), &p.b, barrier, 0, 0, 0, 0);
  }
  if (p.fault != 6) mbarrier_wait(barrier, p.fault == 7 ? 1 : 0);
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = 1.f;
  if (p.fault != 8) wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    if (p.fault == 9 && warp_index() == 2) continue;
    wgmma_ss<64, kIsBf16, false, false>(d, descriptor(a + k * 32, 0), descriptor(b + k * 32, 0), k != 0);
  }
  if (p.fault != 10) wgmma_commit();
  if (p.fault == 11) d[5] *= 2.f;
  if (p.fault == 12) sync_block(), st_shared(a + thread_index() * 4, 0.f);
  if (p.fault == 13) store_products(p, d);
  if (p.fault != 14) wgmma_wait<0>();
  if (p.fault == 15) wgmma_ss<64, kIsBf16, false, false>(d, descriptor(a, 0), descriptor(b, 0), true);
  if (p.fault == 15) wgmma_commit(), wgmma_wait<0>();
  store_products(p, d);
}

// The same with A in registers and B stored [k][n]; then with A stored [k][m] too.
KERNEL(128, 1) transposed(GRID_CONSTANT P p) {
  const u32 a = shared_base(), b = a + 8192, barrier = b + 8192;
  if (thread_index() == 0) mbarrier_init(barrier, 1), fence_mbarrier_init();
  sync_block();
  if (thread_index() == 0) {
    mbarrier_arrive_expect_tx(barrier, 16384);
    tma_load_4d(a, &p.a, barrier, 0, 0, 0, 0);
    tma_load_4d(b, &p.b, barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(barrier, 0);
  float d[32];
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    if (p.fault == 0) {
      u32 r[4];
      const u32 row = warp_index() * 16 + lane_index() % 16, chunk = k * 2 + lane_index() / 16;
      ldmatrix_x4(r, a + row * 128 + ((chunk ^ row % 8) << 4));
      wgmma_rs<64, kIsBf16, true>(d, r[0], r[1], r[2], r[3], descriptor(b + k * 2048, 8192), k != 0);
    } else {
      wgmma_ss<64, kIsBf16, true, true>(d, descriptor(a + k * 2048, 8192), descriptor(b + k * 2048, 8192), k != 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  store_products(p, d);
}

// What threads write, wgmma reads: A and B are the identity.
KERNEL(128, 1) written_by_threads(GRID_CONSTANT P p) {
  const u32 a = shared_base(), row = thread_index() / 2;
  for (int c = thread_index() % 2 * 4; c < thread_index() % 2 * 4 + 4; ++c) {
    U32x4 chunk = {0, 0, 0, 0};
    const u32 one = row % 2 ? 0x3f800000u : 0x3f80u;
    if (c == (int)row / 8) (row % 8 / 2 == 0 ? chunk.x : row % 8 / 2 == 1 ? chunk.y : row % 8 / 2 == 2 ? chunk.z : chunk.w) = one;
    st_shared(a + row * 128 + ((c ^ row % 8) << 4), chunk);
  }
  if (p.fault == 0) fence_proxy_async();
  if (p.fault != 2) sync_block();
  if (p.fault == 3) fence_proxy_async();
  float d[32];
  wgmma_fence();
  for (int k = 0; k < 4; ++k) wgmma_ss<64, kIsBf16, false, false>(d, descriptor(a + k * 32, 0), descriptor(a + k * 32, 0), k != 0);
  wgmma_commit();
  wgmma_wait<0>();
  store_products(p, d);
}

// Shared memory to global memory by the copy engine.
KERNEL(128, 1) bulk(GRID_CONSTANT P p) {
  const u32 s = shared_base();
  st_shared(s + thread_index() * 4, (float)thread_index());
  if (p.fault != 1) fence_proxy_async();
  if (p.fault != 2) sync_block();
  if (thread_index() == 0) {
    bulk_reduce_add_f32(p.out + (p.fault == 3 ? 1 : 0), s, 512);
    if (p.fault != 4) bulk_commit();
    if (p.fault == 5) st_shared(s, 1.f);
    if (p.fault != 6) bulk_wait_read<0>();
    if (p.fault == 7) st_shared(s, 1.f);
  }
}
KERNEL(128, 1) box(GRID_CONSTANT P p) {
  const u32 s = shared_base(), barrier = s + 8192;
  if (thread_index() == 0) mbarrier_init(barrier, 1), fence_mbarrier_init();
  sync_block();
  if (thread_index() == 0) {
    mbarrier_arrive_expect_tx(barrier, 8192);
    tma_load_4d(s, &p.a, barrier, 0, p.row, 0, 0);
    mbarrier_wait(barrier, 0);
    if (p.fault == 1) st_shared(s, 0u);
    tma_store_5d(&p.c, s, 0, p.row, 0, 0, 0);
    bulk_commit();
    bulk_wait<0>();
  }
}
KERNEL(128, 1) run(GRID_CONSTANT P p) {
  const u32 s = shared_base(), barrier = s + 8192;
  if (thread_index() == 0) mbarrier_init(barrier, 1), fence_mbarrier_init();
  sync_block();
  if (thread_index() == 0) {
    mbarrier_arrive_expect_tx(barrier, 512);
    bulk_load(s, p.in + p.row, 512, barrier);
  }
  if (p.fault != 1) mbarrier_wait(barrier, 0);
  st_global(p.out + thread_index(), ld_shared<float>(s + thread_index() * 4));
}

// A ring of one stage between warp 0 and warps 1 to 3.
KERNEL(128, 1) ring(GRID_CONSTANT P p) {
  const u32 s = shared_base(), full = s + 1024, empty = full + 8;
  if (thread_index() == 0) mbarrier_init(full, 32), mbarrier_init(empty, p.fault == 1 ? 2 : 3);
  sync_block();
  for (int i = 0; i < 3; ++i) {
    if (warp_index() == 0) {
      if (p.fault != 2) mbarrier_wait(empty, i & 1 ^ 1);
      st_shared(s + lane_index() * 4, (float)i);
      mbarrier_arrive(full);
    } else {
      while (!mbarrier_try_wait(full, i & 1)) {}
      const float x = ld_shared<float>(s + lane_index() * 4);
      if (p.fault != 3) sync_warp();
      if (lane_index() == 0) mbarrier_arrive(empty);
      st_global(p.out + thread_index(), x);
    }
  }
}
KERNEL(128, 1) named(GRID_CONSTANT P p) {
  const u32 s = shared_base();
  if (warp_index() < 2) {
    st_shared(s + thread_index() * 4, 3.f);
    if (p.fault != 1) barrier_arrive(p.fault == 2 ? 0 : 1, p.fault == 3 ? 96 : 128);
    if (p.fault == 4) barrier_arrive(1, 128);
    if (p.fault == 5) st_shared(s + thread_index() * 4, 4.f);
  } else {
    barrier_sync(1, 128);
    st_global(p.out + thread_index(), ld_shared<float>(s + (thread_index() - 64) * 4));
  }
}
KERNEL(384, 1) registers(GRID_CONSTANT P p) {
  if (warp_index() >= 4) setmaxnreg_inc<240>();
  else if (p.fault == 0) setmaxnreg_dec<24>();
  else if (p.fault == 2) setmaxnreg_dec<200>();
  else if (p.fault == 3) setmaxnreg_dec<20>();
}
KERNEL(128, 1) matrices(GRID_CONSTANT P p) {
  const u32 address = shared_base() + warp_index() * 512 + lane_index() * 16;
  u32 r[4], back[4];
  for (int i = 0; i < 4; ++i) r[i] = thread_index() * 4 + i;
  stmatrix_x4(address, r);
  sync_warp();
  ldmatrix_x4(back, address);
  for (int i = 0; i < 4; ++i) st_global(p.out + thread_index() * 4 + i, (float)back[i]);
}
KERNEL(128, 1) roles(GRID_CONSTANT P p) {
  const bool elected = elect();
  const int same = uniform(lane_index() + 7);
  u32 ticket = 0;
  if (thread_index() == 0) ticket = atomic_add_global((u32*)p.out, 1u);
  if (elected) st_global(p.out + 1 + warp_index() + block_index() * 4, (float)(same + ticket + grid_size()));
}
"""


class Run:
    """Launches kernels of SOURCE. a and b are [64 x 64] matrices, c takes what TMA stores."""

    def __init__(self, folder, seed=0):
        self.kernel = emulator.load(CONFIG, folder=folder, seed=seed)
        generator = torch.Generator().manual_seed(3)
        self.a, self.b = (torch.randn(1, 64, 1, 64, generator=generator).bfloat16() for _ in range(2))
        self.c = torch.full((1, 64, 1, 64), -1.0, dtype=torch.bfloat16)
        self.inputs = torch.arange(256, dtype=torch.float32)
        self.out = torch.zeros(64, 64)

    def __call__(self, entry, fault=0, *, row=0, threads=128, grid=1):
        maps = b"".join(
            emulator.tensor_map(t.data_ptr(), (64, 64, *ones), (128, 128, *(8192 for _ in ones[1:])), (64, 64, *ones))
            for t, ones in ((self.a, (1, 1)), (self.b, (1, 1)), (self.c, (1, 1, 1)))
        )
        params = maps + struct.pack("QQii40x", self.inputs.data_ptr(), self.out.data_ptr(), fault, row)
        named = (("a", self.a), ("b", self.b), ("c", self.c), ("in", self.inputs), ("out", self.out))
        tensors = [(t.data_ptr(), t.numel() * t.element_size(), name, name in ("c", "out")) for name, t in named]
        self.kernel.launch(entry, grid, threads, 20480, params, tensors=tensors)
        return self.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hopper")
    (folder / "hopper.cu").write_text(SOURCE)
    return folder


@pytest.fixture
def run(folder):
    return Run(folder)


def fault(run, entry, number, **options):
    """What the error of a launch that must fail says."""
    with pytest.raises(emulator.EmulationError) as raised:
        run(entry, number, **options)
    return raised.value.what


# ---- wgmma and TMA ----


def expected(run, transpose_a=False, transpose_b=False):
    a, b = run.a[0, :, 0].float(), run.b[0, :, 0].float()
    return (a.T if transpose_a else a) @ (b if transpose_b else b.T)


@pytest.mark.parametrize("seed", range(4))
def test_product(folder, seed):
    run = Run(folder, seed)
    torch.testing.assert_close(run("product"), expected(run))


def test_product_of_transposed_operands(run):
    torch.testing.assert_close(run("transposed"), expected(run, transpose_b=True))
    run.out.zero_()
    torch.testing.assert_close(run("transposed", 1), expected(run, transpose_a=True, transpose_b=True))


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (1, "no mbarrier was initialised"),
        (2, "no fence_mbarrier_init"),
        (3, "mbarrier"),
        (4, "deadlock: threads 0-127 wait in mbarrier_wait at hopper.cu"),
        (5, "not aligned to 128"),
        (6, "has not arrived|not ordered"),
        (7, "has not arrived|not ordered"),
        (8, "without wgmma_fence"),
        (9, "do not issue the same wgmma"),
        (10, "uncommitted"),
        (11, "was written while this product was under way"),
        (12, "may still read"),
        (14, "no wgmma_wait covers it"),
        (15, "without wgmma_fence"),
    ],
)
def test_product_with_a_fault(run, number, what):
    assert re.search(what, fault(run, "product", number))


def test_accumulators_are_nan_until_the_wait(folder):
    """Fault 13 stores them before the wait; here nothing is stored after it."""
    run = Run(folder)
    source = SOURCE.replace("  store_products(p, d);\n}\n\n// The same", "}\n\n// The same")
    run.kernel = emulator.load(CONFIG, folder=folder, patch=lambda name, text: source if name == "hopper.cu" else text)
    assert run("product", 13).isnan().all()


def test_fence_between_threads_and_wgmma(run):
    assert torch.equal(run("written_by_threads"), torch.eye(64))
    assert torch.equal(run("written_by_threads", 3), torch.eye(64))
    assert "no fence_proxy_async" in fault(run, "written_by_threads", 1)
    assert "race" in fault(run, "written_by_threads", 2)


@pytest.mark.parametrize("row", [0, 40, -40, 64])
def test_boxes_are_cut_at_the_tensor(run, row):
    """Outside it loads zeros and stores nothing."""
    run("box", row=row)
    inside = torch.arange(64)[:, None] >= row if row >= 0 else torch.arange(64)[:, None] < 64 + row
    torch.testing.assert_close(run.c[0, :, 0], torch.where(inside, run.a[0, :, 0], -1.0).to(torch.bfloat16))
    shifted = torch.zeros(64, 64)
    if abs(row) < 64:
        kept = slice(row, 64) if row >= 0 else slice(0, 64 + row)
        shifted[: 64 - row if row >= 0 else 64][-row if row < 0 else 0 :] = run.a[0, kept, 0].float()
    run.out.zero_()
    torch.testing.assert_close(run("product", row=row), shifted @ run.b[0, :, 0].float().T)


def test_store_needs_a_fence(run):
    assert "no fence_proxy_async" in fault(run, "box", 1)


def test_tensor_maps_are_checked():
    for arguments in (
        (8, (64, 64, 1), (128, 8192), (64, 64, 1)),
        (16, (64, 64, 1), (120, 8192), (64, 64, 1)),
        (16, (64, 64, 1), (128, 8192), (64, 257, 1)),
        (16, (64, 64, 1), (128, 8192), (128, 64, 1)),
        (16, (64, 64), (128,), (64, 64)),
    ):
        with pytest.raises(ValueError):
            emulator.tensor_map(*arguments)


# ---- bulk copies ----


@pytest.mark.parametrize("seed", range(4))
def test_bulk_copies(folder, seed):
    run = Run(folder, seed)
    assert torch.equal(run("bulk").flatten()[:128], torch.arange(128.0))
    assert torch.equal(run("bulk", 7).flatten()[:128], torch.arange(128.0) * 2)
    assert torch.equal(run("run", row=8).flatten()[:128], run.inputs[8:136])


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (1, "no fence_proxy_async"),
        (2, "race"),
        (3, "multiples of 16"),
        (4, "never committed"),
        (5, "may still read"),
        (6, "no bulk_wait covers it"),
    ],
)
def test_bulk_copies_with_a_fault(run, number, what):
    assert what in fault(run, "bulk", number)


def test_bulk_load_with_a_fault(run):
    assert re.search("has not arrived|not ordered", fault(run, "run", 1))
    assert "outside every tensor" in fault(run, "run", 0, row=192)
    assert "multiples of 16" in fault(run, "run", 0, row=2)


# ---- barriers, registers, the rest ----


@pytest.mark.parametrize("seed", range(4))
def test_ring(folder, seed):
    assert Run(folder, seed)("ring").flatten()[32:128].tolist() == [2.0] * 96


def test_ring_with_a_fault(run):
    assert re.search("more arrivals|race", fault(run, "ring", 1))
    assert re.search("deadlock|race", fault(run, "ring", 2))
    assert "race" in fault(run, "ring", 3)


def test_named_barriers(run):
    assert run("named").flatten()[64:128].tolist() == [3.0] * 64
    assert "deadlock" in fault(run, "named", 1) and "barrier_sync" in fault(run, "named", 1)
    assert "0 is sync_block's" in fault(run, "named", 2)
    assert "while others are there for" in fault(run, "named", 3)
    assert "twice" in fault(run, "named", 4)
    assert "race" in fault(run, "named", 5)


def test_registers(run):
    """384 threads have 168 each at launch."""
    run("registers", threads=384)
    assert "wait in setmaxnreg_inc" in fault(run, "registers", 1, threads=384)
    assert "has 168 a thread" in fault(run, "registers", 2, threads=384)
    assert "multiple of 8 from 24 to 256" in fault(run, "registers", 3, threads=384)


def test_matrices(run):
    assert torch.equal(run("matrices").flatten()[:512], torch.arange(512.0))


def test_roles(run):
    out = run("roles", grid=2).flatten()
    assert out[1:9].tolist() == [9, 9, 9, 9, 10, 9, 9, 9]
