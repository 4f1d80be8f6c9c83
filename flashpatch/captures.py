"""One real attention call as a small file: its tensors and arguments, what came of it, and how far that is from exact.

A capture is a safetensors file: the tensors as the call had them (broadcast dimensions once) and what it returned; scalars and
where it comes from are the file's metadata. `replay` runs it again, on the GPU, in the emulator or by the fallback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch

from . import counting, emulator, execution, fallback, launcher, planning, reference, tolerance
from .arguments import FLOATING
from .call import TENSORS, Call
from .problem import BuildFailure, Device, Plan, Problem

INPUTS = ("q", "k", "v")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
_SCALARS = (
    "softmax_scale", "max_seqlen_q", "max_seqlen_k", "window_left", "window_right", "softcap", "dropout_p",
    "deterministic",
)  # fmt: skip
_FORMAT = "flashpatch-capture-1"


class CaptureError(ValueError):
    """The file is no capture, or cannot be read; the text says which."""


@dataclass
class Capture:
    """One attention call and its results. `results` has out and logsumexp and, where its backward was heard, dout (what came
    in), dq, dk, dv, dbias, dsinks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    call: Call
    results: dict[str, torch.Tensor]
    module: str = ""
    model: str = ""
    ran_on: str = ""
    versions: dict[str, str] = field(default_factory=dict)


# ---- hearing a call ----


@contextlib.contextmanager
def listening(module: str, number: int = 1):
    """Yields a list that gets the Capture of the module's call of that number, its backward too if there is one.

    The operators' bodies are replaced while somebody listens, so that nobody pays otherwise.
    """
    heard: list[Capture] = []
    plain_forward, plain_backward = execution.forward, execution.backward
    calls = 0

    def forward(q, k, v, call, layer, strict, *rest):
        nonlocal calls
        before = counting.layers[layer].launches.copy()
        result = plain_forward(q, k, v, call, layer, strict, *rest)
        if counting.layers[layer].name == module:
            calls += 1
            if calls == number:
                ran = counting.layers[layer].launches - before
                names = ("out", "logsumexp")
                results = {name: _copy(t) for name, t in zip(names, result, strict=True) if t is not None}
                kept = dataclasses.replace(call, ready=None, **{name: _copy(getattr(call, name)) for name in TENSORS})
                versions = {"torch": torch.__version__, "device": _device_name(q.device)}
                heard.append(
                    Capture(
                        _copy(q), _copy(k), _copy(v), kept, results, module, "", next(iter(ran), "fallback"), versions
                    )
                )
                heard_address[:] = [q.data_ptr(), tuple(q.shape)]
        return result

    def backward(dout, dlogsumexp, q, k, v, out, logsumexp, call, layer, strict):
        gradients = plain_backward(dout, dlogsumexp, q, k, v, out, logsumexp, call, layer, strict)
        if heard and counting.layers[layer].name == module and heard_address == [q.data_ptr(), tuple(q.shape)]:
            results = heard[0].results
            results["dout"], results["logsumexp"] = _copy(dout), _copy(logsumexp)
            if dlogsumexp is not None:
                results["dlogsumexp"] = _copy(dlogsumexp)
            found = zip(GRADIENTS, gradients, strict=True)
            results.update({name: _copy(gradient) for name, gradient in found if gradient is not None})
        return gradients

    heard_address: list = []
    execution.forward, execution.backward = forward, backward
    try:
        yield heard
    finally:
        execution.forward, execution.backward = plain_forward, plain_backward


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of its own; dimensions that are only repeated are kept once, and repeated by stride again."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return _once(tensor).clone(memory_format=torch.contiguous_format).expand(tensor.shape)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# ---- the file ----


def save(capture: Capture, path: str | Path) -> Path:
    """Write a capture. The path should end in .safetensors."""
    from safetensors.torch import save_file

    given = {name: getattr(capture.call, name) for name in TENSORS}
    tensors = {**{name: getattr(capture, name) for name in INPUTS}, **given}
    tensors |= {f"result.{name}": tensor for name, tensor in capture.results.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    metadata = {
        "format": _FORMAT,
        "scalars": json.dumps({name: getattr(capture.call, name) for name in _SCALARS}),
        "shapes": json.dumps({name: list(tensor.shape) for name, tensor in tensors.items()}),
        "origin": json.dumps({name: getattr(capture, name) for name in ("module", "model", "ran_on", "versions")}),
    }
    path = Path(path)
    stored = {name: _once(tensor).contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(stored, path, metadata)
    except OSError as error:
        raise CaptureError(f"{path} cannot be written: {error}") from error
    return path


def load(path: str | Path, device: torch.device | str = "cpu") -> Capture:
    """Read a capture. Raises CaptureError for anything else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CaptureError(f"{path} is no captured call; `flashpatch verify MODEL --capture FILE` writes one")
            shapes = json.loads(metadata["shapes"])
            tensors = {name: file.get_tensor(name).expand(shape) for name, shape in shapes.items()}
        return _capture(tensors, json.loads(metadata["scalars"]), json.loads(metadata["origin"]))
    except CaptureError:
        raise
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{path} cannot be read as a captured call: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        text = f"{path} is a damaged capture ({type(error).__name__}: {error}); capture the call again"
        raise CaptureError(text) from error


def _capture(tensors: dict[str, torch.Tensor], scalars: dict, origin: dict) -> Capture:
    """Of the parts of a file, which anybody may have written."""
    inputs = [tensors[name] for name in INPUTS]
    if not all(tensor.dtype in FLOATING and tensor.dim() in (3, 4) for tensor in inputs):
        raise ValueError("q, k and v must be floating-point tensors of three or four dimensions")
    if set(scalars) != set(_SCALARS) or not all(isinstance(value, (int, float)) for value in scalars.values()):
        raise ValueError(f"scalars must be numbers: {', '.join(_SCALARS)}")
    call = Call(**scalars, **{name: tensors.get(name) for name in TENSORS}, expanded=True)
    results = {name.removeprefix("result."): tensor for name, tensor in tensors.items() if name.startswith("result.")}
    return Capture(*inputs, call, results, **origin)


# ---- how far a call's results are from exact ----


@dataclass(frozen=True)
class CallCheck:
    """One tensor of a captured call against the fp64 reference on the very same inputs."""

    tensor: Annotated[str, "out, logsumexp, dq, dk, dv, dbias or dsinks"]
    error: Annotated[float, "largest absolute difference from the fp64 reference; null if NaN"]
    eager_error: Annotated[float, "the same for PyTorch's own operations in the call's dtype"]
    bound: Annotated[float, "2 x eager_error (gradients 3 x) + rounding of the dtype"]
    passed: Annotated[bool, "error is within bound"]
    worst_index: Annotated[list[int], "where the difference is largest"]
    heads: Annotated[list[int], "heads with a difference beyond the bound (dk and dv: key/value heads)"]


def check(capture: Capture, results: dict[str, torch.Tensor]) -> list[CallCheck]:
    """Compare results of a captured call (its own, or others of the same call) with the reference."""
    backward = "dout" in results or "dout" in capture.results
    exact, eager = (_expected(capture, upcast, backward) for upcast in (True, False))
    statistics = exact["logsumexp"][exact["logsumexp"].isfinite()].abs()
    largest_logsumexp = float(statistics.max()) if statistics.numel() else 0.0
    checks = []
    for name in ("out", "logsumexp", *GRADIENTS):
        actual = results.get(name)
        if actual is None or name not in exact or actual.numel() == 0:
            continue
        wanted = exact[name]
        # a gradient of what was broadcast is summed over it
        actual, own = actual.reshape(wanted.shape), eager[name]
        factor = tolerance.FORWARD_FACTOR if name in ("out", "logsumexp") else tolerance.GRADIENT_FACTOR
        outcome = tolerance.compare(actual, own, wanted, factor=factor)
        finite = wanted[wanted.isfinite()].abs()
        # one call may have few numbers, among which eager is exact by luck; the device's exp2 and log2 are good to 2 ulp each
        unit = 4 * torch.finfo(torch.float32).eps if name == "logsumexp" else torch.finfo(actual.dtype).eps / 2
        if actual.dtype == torch.float32 and name != "logsumexp":  # p is off by what rounding costs its exponent
            unit += torch.finfo(torch.float32).eps * largest_logsumexp
        bound = outcome.bound + unit * float(finite.max() if finite.numel() else 0.0)
        eager_error = tolerance.compare(own, own, wanted, factor=factor).error
        passed = outcome.error <= bound
        heads = [] if passed else _heads(name, actual, wanted, bound, capture)
        checks.append(CallCheck(name, outcome.error, eager_error, bound, passed, list(outcome.worst_index), heads))
    return checks


def _heads(name: str, actual, wanted, bound: float, capture: Capture) -> list[int]:
    axis = {"logsumexp": 0 if capture.call.cu_seqlens_q is not None else 1, "dbias": 1, "dsinks": 0}.get(name, -2)
    if actual.shape[axis] not in (capture.q.shape[-2], capture.k.shape[-2]):
        return []  # summed over heads
    difference = torch.where(actual.double() == wanted.double(), 0.0, (actual.double() - wanted.double()).abs())
    beyond = ~(difference <= bound)
    return (
        beyond.movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
        if beyond.dim() > 1
        else (beyond.nonzero().flatten().tolist())
    )


def _expected(capture: Capture, upcast: bool, backward: bool) -> dict[str, torch.Tensor]:
    """The reference's results, in fp64 or as eager PyTorch in the call's dtype."""
    call = capture.call
    leaves = {"q": capture.q, "k": capture.k, "v": capture.v, "bias": call.bias, "sinks": call.sinks}
    leaves = {
        # what no row sees does not matter to the definition, so the reference need not bear NaN there
        name: (tensor.double() if upcast else tensor).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        if name in ("k", "v") and _hides_keys(call)
        else (tensor.double() if upcast else tensor.clone())
        for name, tensor in leaves.items()
        if tensor is not None
    }
    if backward:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    keep = None
    if call.dropout_p:
        batch = capture.q.shape[0] if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
        shape = (batch, capture.q.shape[-2], call.max_seqlen_q, call.max_seqlen_k)
        keep = reference.dropout_keep(call.rng_state.tolist(), call.dropout_p, *shape).to(capture.q.device)
    out, logsumexp = reference.attention(
        **leaves, softmax_scale=call.softmax_scale, window_size=(call.window_left, call.window_right), softcap=call.softcap,
        mask=call.mask, alibi_slopes=call.alibi_slopes, key_ranges=call.key_ranges, cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k, seqused_k=call.seqused_k, dropout_p=call.dropout_p, keep=keep, upcast=upcast,
    )  # fmt: skip
    found = {"out": out.detach(), "logsumexp": logsumexp.detach()}
    if backward:
        incoming = capture.results["dout"].to(out.dtype)
        outputs, gradients = [out], [incoming]
        if (dlogsumexp := capture.results.get("dlogsumexp")) is not None:
            outputs.append(logsumexp)
            gradients.append(dlogsumexp.to(logsumexp.dtype).masked_fill(logsumexp.isinf(), 0.0))
        computed = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), computed, strict=True):
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            if name == "bias":
                gradient = gradient.sum_to_size(_once(call.bias).shape)
            found[f"d{name}"] = gradient
    return found


def _hides_keys(call: Call) -> bool:
    return call.mask is not None or call.key_ranges is not None or call.seqused_k is not None


# ---- running it again ----


@dataclass(frozen=True)
class ReplayReport:
    """`flashpatch verify --replay FILE`."""

    file: Annotated[str, "the captured call"]
    model: Annotated[str, "the model it comes from"]
    module: Annotated[str, "the attention module that made it"]
    dtype: Annotated[str, "dtype of its q, k, v"]
    shapes: Annotated[dict[str, list[int]], "shapes of q, k, v and of every optional tensor"]
    features: Annotated[list[str], "what it asks for beyond plain attention"]
    captured_on: Annotated[str, "kernel, or fallback, and device it ran on when it was captured"]
    captured: Annotated[list[CallCheck], "what it returned then, against the reference"]
    replayed_on: Annotated[str, "what it ran on now"]
    backend: Annotated[str, "gpu, emulated or fallback"]
    replayed: Annotated[list[CallCheck], "what it returned now"]
    declines: Annotated[list[str], "why no kernel took it, as code: text"]
    error: Annotated[str, "a kernel that failed to build or run; empty otherwise"]

    @property
    def holds(self) -> bool:
        return not self.error and bool(self.replayed) and all(check.passed for check in self.replayed)


def replay(path: str | Path, device: Device | None) -> ReplayReport:
    """Run a captured call again on a Device (None: by the fallback) and compare both results with the reference."""
    on_gpu = device is not None and device.backend == "gpu"
    capture = load(path, torch.device("cuda", device.index) if on_gpu else "cpu")
    q, k, v, call = capture.q, capture.k, capture.v, capture.call
    asked = execution.features(q, k, v, call)
    dtype = execution.DTYPES.get(q.dtype, str(q.dtype).removeprefix("torch."))
    problem = Problem("forward", dtype, q.shape[-1], v.shape[-1], asked)
    directions = [problem, problem.backward()] if "dout" in capture.results else [problem]
    plans = [planning.resolve(one, device) if device else None for one in directions]
    declines = [str(plan) for plan in plans if device and not isinstance(plan, Plan)]
    results, error = {}, ""
    kernels = [plan.config.kernel for plan in plans if isinstance(plan, Plan)]
    try:
        results = _run(capture, plans)
    except (BuildFailure, emulator.EmulationError) as failure:
        error = str(failure)
    optional = {name: getattr(call, name) for name in TENSORS if getattr(call, name) is not None}
    return ReplayReport(
        str(path),
        capture.model,
        capture.module,
        dtype,
        {name: list(tensor.shape) for name, tensor in {"q": q, "k": k, "v": v, **optional}.items()},
        sorted(asked),
        f"{capture.ran_on}, {capture.versions.get('device', 'unknown device')}",
        check(capture, capture.results),
        " and ".join(kernels) + f" on {device.name}" if kernels else "flashpatch's exact fallback",
        device.backend if kernels else "fallback",
        check(capture, results),
        list(dict.fromkeys(declines)),
        error,
    )


def _run(capture: Capture, plans: list[Plan | object]) -> dict[str, torch.Tensor]:
    q, k, v, call, given = capture.q, capture.k, capture.v, capture.call, capture.results
    if isinstance(plans[0], Plan):
        out, logsumexp, _ = launcher.forward(plans[0], q, k, v, call)
    else:
        out, logsumexp = fallback.forward(q, k, v, call)
    results = {"out": out, "logsumexp": logsumexp}
    if len(plans) > 1:
        arguments = (given["dout"], given.get("dlogsumexp"), q, k, v, out, logsumexp, call)
        if isinstance(plans[1], Plan):
            *gradients, _ = launcher.backward(plans[1], *arguments)
        else:
            gradients = fallback.backward(*arguments)
        results.update({name: g for name, g in zip(GRADIENTS, gradients, strict=True) if g is not None})
    return results
