"""What is asked of attention (`Problem`) and what will or will not run for it (`Plan`, `Decline`).

Plain data without torch, so that a plan can be made for a GPU nobody has here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

DIRECTIONS = ("forward", "backward")
DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn")
# Those that come with factors per head (`q_descale`, ...), give out in bfloat16 and have no backward.
SCALED = frozenset({"float8_e4m3fn"})


@dataclass(frozen=True)
class Problem:
    """One attention call as the planner sees it: everything that decides which kernel can run, and nothing else.

    `features` names what the call asks for beyond plain attention, in the matrix's words
    (`compat_matrix.yaml`, `features`): causal, window, gqa, varlen, seqused_k, key_ranges, mask, softcap, ...
    `short`: no sequence is longer than the matrix's `short_seqlen`; it only chooses between tiles.
    """

    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    features: frozenset[str] = frozenset()
    short: bool = False
    tf32: bool = False  # fp32 with the products rounded to TF32, as the user allowed torch's own matrix products to be

    def backward(self) -> Problem:
        """The backward of this forward."""
        return replace(self, direction="backward")


@dataclass(frozen=True)
class Device:
    """A GPU, real or faked, as far as planning needs it.

    `capability` is (major, minor); `shared_memory` is the opt-in bytes per block;
    `backend` says how kernels run there: "gpu" or "emulated". `stands_for` is set where the planner takes the kernels and
    limits of another capability than the device has (FLASHPATCH_GENERATION); they are compiled for the one it has.
    """

    name: str
    generation: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int = 0
    index: int = 0
    backend: str = "gpu"
    stands_for: tuple[int, int] | None = None


@dataclass(frozen=True)
class Config:
    """All that is fixed when a kernel is compiled. Two equal Configs are the same cubin.

    `kernel` is the source file's stem in `cuda_src/`. Every other field becomes a constant of the
    same name in CamelCase with a leading k (`head_dim` -> `kHeadDim`) in front of the kernel's source.
    """

    kernel: str
    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    has_window: bool = False
    has_key_ranges: bool = False
    has_mask: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_dropout: bool = False
    deterministic: bool = False
    wide_bias: bool = False  # fp32 beside q, k, v of 16 bits
    tf32: bool = False


@dataclass(frozen=True)
class Reason:
    """Why a kernel does not take a problem: a stable `code` for machines, `text` for people."""

    code: str
    text: str


class BuildFailure(RuntimeError):
    """A kernel could not be built. `reason` is what a Decline says and what to type, the text has the compiler's log."""

    def __init__(self, reason: Reason, log: str = ""):
        super().__init__(f"{reason.text}\n{log}".strip())
        self.reason, self.log = reason, log

    def __reduce__(self):
        return type(self), (self.reason, self.log)


@dataclass(frozen=True)
class Decline:
    """No kernel takes the problem. All reasons at once, and the nearest thing that would run on one."""

    problem: Problem
    reasons: tuple[Reason, ...]
    nearest: str = ""

    def __str__(self) -> str:
        text = "; ".join(f"{reason.code}: {reason.text}" for reason in self.reasons)
        return f"{text} (nearest: {self.nearest})" if self.nearest else text


@dataclass(frozen=True)
class Plan:
    """The kernel that will run a problem on a device.

    `status` is the matrix's word ("verified" or "compiled"), `note` what it says beside it.
    """

    problem: Problem
    device: Device
    config: Config
    status: str
    note: str = ""
    cells: tuple[str, ...] = field(default=())
    padded_to: tuple[int, int] | None = None  # head dims of q and k, and of v, with the zeros that must go behind them

    @functools.cached_property
    def padding(self) -> str:
        """Which head dims are padded to what, and so which tensors are copied; empty where they are taken as they are."""
        if self.padded_to is None:
            return ""
        given = (self.problem.head_dim, self.problem.head_dim_v)
        beside_v = ("out", "dout") if self.problem.direction == "backward" else ()
        words, copied = [], []
        for label, size, padded, tensors in zip(
            ("head_dim", "head_dim_v"), given, self.padded_to, (("q", "k"), ("v", *beside_v)), strict=True
        ):
            if size != padded:
                words.append(f"{label} {size} padded to {padded}")
                copied.extend(tensors)
        if words[1:] and given[0] == given[1]:
            words.pop()
        return f"{', '.join(words)} ({', '.join(copied)} copied)"

    @functools.cached_property
    def label(self) -> str:
        """What its launches are counted under."""
        return self.config.kernel + (" (TF32)" if self.config.tf32 else "")


class DeclinedError(RuntimeError):
    """Raised where falling back was not allowed (`on_decline="error"`, strict). `decline` has all reasons."""

    def __init__(self, decline: Decline):
        what = "attention" if isinstance(decline.problem, Problem) else "call"
        super().__init__(f"no flashpatch kernel takes this {what}: {decline}")
        self.decline = decline

    def __reduce__(self):  # errors cross processes: data loaders, launchers, futures
        return type(self), (self.decline,)
