"""One attention call at run time: plan it, run it on a kernel, count it; or name why not and compute it exactly.

This is the body of the operators in `operators`. It is never traced, so it may count, warn and fall back.
"""

from __future__ import annotations

import os

import torch

from . import fallback, launcher, planning, tensor_layouts
from .call import Call
from .counting import layers, record_decline, switched_on
from .padding import PaddedForward
from .problem import BuildFailure, Decline, DeclinedError, Device, Plan, Problem, Reason

DTYPES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3fn",
}  # fmt: skip
# With a softcap kernels take numbers with which the coefficients of their polynomial for tanh, powers of softmax_scale / softcap times
# softmax_scale, stay in fp32's range (cuda_src/scores.cuh).
_LARGEST_SOFTCAP = 1e9
_SCALE_WITH_SOFTCAP = 1e-10, 1e10
_SCALE_OVER_SOFTCAP = 1e-8, 1e6
# Decoding makes a new signature a step; a cache this full starts again.
_MOST_SIGNATURES = 4096

_failures: dict[tuple, Reason] = {}  # (kernel Config, device) that could not be built or loaded


_NOTHING = (tensor_layouts.never, None)


class _Prepared:
    """What is ready to launch, or the Decline, by all that decides it: dtypes, devices, layouts and the Call's own part.

    The layers of a model mostly call alike: what came last with the same Call's part is recognised by one check in C++
    of what its tensors have, which costs a third of a key made of it.
    """

    def __init__(self):
        self.found: dict[tuple, tuple] = {}
        self.latest: dict[tuple, tuple] = {}

    def find(self, call: Call, q, *others):
        """What was kept for a Call on tensors with these layouts, or None."""
        rest = self._rest(call, q)
        alike, ready = self.latest.get(rest, _NOTHING)
        if alike(q, *others):
            return ready
        found = self.found.get(self._key(rest, q, *others))
        if found is None:
            return None
        self.latest[rest] = found
        return found[1]

    def keep(self, ready, call: Call, *tensors) -> None:
        rest = self._rest(call, tensors[0])
        on_gpu = tensors[0].get_device() >= 0  # only there nothing else may change it
        alike = tensor_layouts.check(*tensors) if on_gpu else tensor_layouts.never
        if len(self.found) >= _MOST_SIGNATURES:
            self.found.clear()
            self.latest.clear()
        self.latest[rest] = self.found[self._key(rest, *tensors)] = alike, ready

    @staticmethod
    def _rest(call: Call, q) -> tuple:
        dtype = q.dtype
        return call.signature(), dtype is torch.float32 and takes_tf32(dtype)

    @staticmethod
    def _key(rest: tuple, *tensors) -> tuple:
        on_cpu = tensors[0].get_device() < 0
        return (
            rest,
            on_cpu and _switches(),
            *((t.dtype, t.get_device(), t.shape, t.stride(), t.requires_grad) for t in tensors),
        )


_forwards, _backwards = _Prepared(), _Prepared()


def forward(q, k, v, call: Call, layer: int, strict: bool, statistics: bool = True):
    """(out, logsumexp) of a checked call, by a kernel or by the fallback. Without `statistics` logsumexp may be None."""
    counts = layers[layer]
    counts.called()
    ready = call.ready or prepare(q, k, v, call)
    if ready.__class__ is not Decline:
        try:
            out, logsumexp, copies = ready.run(q, k, v, call, statistics)
            counts.launched(ready.plan, copies)
            return out, logsumexp
        except BuildFailure as error:
            ready = call.ready = _failed(ready.plan, error)
            _forwards.keep(ready, call, q, k, v)
    _declined(ready, layer, strict)
    return fallback.forward(q, k, v, call)


def prepare(q, k, v, call: Call) -> launcher.Forward | PaddedForward | Decline:
    """The forward of a call ready to launch, or why no kernel takes it; decided once per signature."""
    ready = _forwards.find(call, q, k, v)
    if ready is None:
        decision = decide("forward", q, k, v, call)
        ready = launcher.ready_forward(decision, q, k, v, call) if isinstance(decision, Plan) else decision
        _forwards.keep(ready, call, q, k, v)
    return ready


def backward(dout, dlogsumexp, q, k, v, out, logsumexp, call: Call, layer: int, strict: bool):
    """(dq, dk, dv, dbias or None, dsinks or None) of a checked call."""
    ready = _backwards.find(call, q, k, v, dout, out)
    if ready is None:
        decision = decide("backward", q, k, v, call)
        plan = isinstance(decision, Plan)
        ready = launcher.ready_backward(decision, dout, q, k, v, out, call) if plan else decision
        _backwards.keep(ready, call, q, k, v, dout, out)
    if ready.__class__ is not Decline:
        try:
            *gradients, copies = ready.run(dout, dlogsumexp, q, k, v, out, logsumexp, call)
            layers[layer].launched(ready.plan, copies)
            return gradients
        except BuildFailure as error:
            ready = _failed(ready.plan, error)
            _backwards.keep(ready, call, q, k, v, dout, out)
    _declined(ready, layer, strict)
    return fallback.backward(dout, dlogsumexp, q, k, v, out, logsumexp, call)


def _switches() -> tuple:
    """What may change between two calls on a CPU; a GPU takes its switch once, at the first call of a signature."""
    return os.environ.get("FLASHPATCH_EMULATE"), os.environ.get(planning.SWITCH)


_matmul_precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # since torch 2.9


def takes_tf32(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are rounded to TF32: fp32 ones where the user lets torch's own matrix products be.

    That is torch.backends.cuda.matmul.allow_tf32 or fp32_precision, torch.backends.fp32_precision, or
    torch.set_float32_matmul_precision: whichever is used, this sees it.
    """
    if dtype != torch.float32:
        return False
    if _matmul_precision is None:
        return torch.backends.cuda.matmul.allow_tf32
    return _matmul_precision("cuda", "matmul") == "tf32"


# ---- deciding ----


def decide(direction: str, q, k, v, call: Call) -> Plan | Decline:
    """The Plan or Decline of a call on the device its tensors are on."""
    dtype = DTYPES.get(q.dtype, str(q.dtype).removeprefix("torch."))
    short = max(call.max_seqlen_q, call.max_seqlen_k) <= planning.support().short_seqlen
    asked = features(q, k, v, call)
    problem = Problem(direction, dtype, q.shape[-1], v.shape[-1], asked, short, takes_tf32(q.dtype))
    device = device_of(q.device)
    if isinstance(device, Reason):
        return Decline(problem, (device,))
    if call.softmax_scale <= 0.0:
        text = f"softmax_scale is {call.softmax_scale}; kernels take the maximum before scaling and need a positive one"
        return Decline(problem, (Reason("softmax_scale", text),))
    if reason := _softcap_fault(call):
        return Decline(problem, (reason,))
    if call.bias is not None and call.bias.dtype not in (q.dtype, torch.float32):
        text = f"the bias is {call.bias.dtype}, q is {q.dtype}; kernels add a bias of q's dtype or of float32"
        return Decline(problem, (Reason("bias_dtype", text),))
    if reason := launcher.unavailable(device.backend):
        return Decline(problem, (reason,))
    decision = planning.resolve(problem, device)
    if isinstance(decision, Plan) and (reason := _failures.get((decision.config, device))):
        return Decline(problem, (reason,))
    return decision


def _softcap_fault(call: Call) -> Reason | None:
    """Why kernels would not compute this softcap exactly, or None."""
    if not call.softcap:
        return None
    scale, over, largest = _SCALE_WITH_SOFTCAP, _SCALE_OVER_SOFTCAP, _LARGEST_SOFTCAP
    quotient = call.softmax_scale / call.softcap
    if call.softcap <= largest and scale[0] <= call.softmax_scale <= scale[1] and over[0] <= quotient <= over[1]:
        return None
    text = (
        f"softcap is {call.softcap:g}, softmax_scale {call.softmax_scale:g}; kernels take a softcap up to {largest:g}, with one a "
        f"softmax_scale of {scale[0]:g} to {scale[1]:g}, and a quotient softmax_scale / softcap of {over[0]:g} to {over[1]:g}"
    )
    return Reason("softcap", text)


def features(q, k, v, call: Call) -> frozenset[str]:
    """What a call asks for beyond plain attention, in the words of compat_matrix.yaml."""
    asked = {
        "causal": call.window_right == 0,
        "window": call.window_left >= 0 or call.window_right > 0,
        "gqa": q.shape[-2] != k.shape[-2],
        "unequal_head_dims": q.shape[-1] != v.shape[-1],
        "varlen": call.cu_seqlens_q is not None,
        "seqused_k": call.seqused_k is not None,
        "key_ranges": call.key_ranges is not None,
        "mask": call.mask is not None,
        "bias": call.bias is not None and call.bias.dtype == q.dtype,
        "wide_bias": call.bias is not None and call.bias.dtype != q.dtype,
        "alibi": call.alibi_slopes is not None,
        "sinks": call.sinks is not None,
        "softcap": call.softcap != 0.0,
        "dropout": call.dropout_p != 0.0,
        "deterministic": call.deterministic,
    }
    return frozenset(name for name, wanted in asked.items() if wanted)


def device_of(device: torch.device) -> Device | Reason:
    """The planner's Device behind a torch device, or why no kernel can run there.

    With FLASHPATCH_EMULATE=1, CPU tensors go through the emulated kernels. FLASHPATCH_GENERATION names a generation whose
    kernels and limits are taken instead of the device's own. Raises planning.SwitchError if that cannot be.
    """
    wanted = os.environ.get(planning.SWITCH)
    if device.type == "cuda" and torch.version.cuda:
        found = own_device(device.index or 0)
        return planning.standing_for(found, wanted) if wanted else found
    if device.type == "cpu" and switched_on("FLASHPATCH_EMULATE"):
        found = planning.device_for((8, 0), "CPU emulator (Ampere)", backend="emulated")
        return planning.standing_for(found, wanted) if wanted else found
    return Reason("no_gpu", f"the tensors are on {device.type}; kernels run on NVIDIA GPUs")


def own_device(index: int) -> Device:
    """A GPU of this machine as it is, whatever FLASHPATCH_GENERATION says."""
    facts = torch.cuda.get_device_properties(index)
    return planning.device_for(
        (facts.major, facts.minor), facts.name, shared_memory=facts.shared_memory_per_block_optin,
        multiprocessors=facts.multi_processor_count, index=index,
    )  # fmt: skip


def _failed(plan: Plan, error: BuildFailure) -> Decline:
    """A kernel that cannot be built or loaded here is a decline from now on, never tried again per call."""
    _failures[plan.config, plan.device] = error.reason
    return Decline(plan.problem, (error.reason,))


def _declined(decline: Decline, layer: int, strict: bool) -> None:
    if strict or switched_on("FLASHPATCH_STRICT"):
        raise DeclinedError(decline)
    for reason in decline.reasons:
        record_decline(layer, reason)
