"""What the operators under a trace say: each attention they make up, read as a `Call` of the module that runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from . import families, findings, mask_kinds, module_reading, operator_reading, sdpa_reasons
from .dense_tracking import MATMULS, Tags, Tracker, nbytes
from .module_stack import Modules
from .observations import Call

# argument of scaled_dot_product_attention, in order -> field of Asked
SDPA_WORDS = {
    "query": "q", "key": "k", "value": "v", "attn_mask": "mask", "dropout_p": "dropout_p", "is_causal": "is_causal",
    "scale": "scale", "enable_gqa": "enable_gqa",
}  # fmt: skip


@dataclass
class Asked:
    """The arguments of a running F.scaled_dot_product_attention."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class Reader:
    """The calls read so far, and what is remembered to read the next: dense scores on their way, outputs, masks seen."""

    def __init__(self, model: torch.nn.Module | None):
        self.calls: list[Call] = []
        self.tracker = Tracker()
        self.modules = Modules(model, self.tracker.parameters)
        self.asked: Asked | None = None
        self.statements: dict[str, None] = {}
        self.cuda = False
        self._outputs = Tags()
        self._mask_kinds = Tags()
        self._documents = Tags()
        self._refusals: dict[tuple, dict[str, str]] = {}

    def read(self, reading, *arguments):
        """What is watched must run as it does unwatched: a call that cannot be read is said, not raised."""
        try:
            return reading(*arguments)
        except Exception as error:
            self.statements[f"{findings.UNREADABLE} ({type(error).__name__}: {error}): worth an issue"] = None
            return None

    def on_other(self, function, args, out) -> None:
        self.tracker.follows(function, args, out)

    def on_clone(self, function, args, out) -> None:
        self.tracker.copies(args, out)
        if self.tracker.tags:
            self.tracker.follows(function, args, out)

    def on_softmax(self, function, args, out) -> None:
        self.tracker.normalises(function, args, out)

    def on_softmax_backward(self, function, args, out) -> None:
        note = self.tracker.tags.get(args[1])
        if note is not None and note.call is not None:
            note.call.backwards.append((None, None))

    def on_matmul(self, function, args, kwargs):
        if torch._C._current_graph_task_id() != -1 and not self.modules.stack:
            return None  # the matmuls of a backward
        note = self.tracker.closes(function, args)
        mark = self._mark(args[0].device) if note is None else None
        if kwargs.get("out") is not None:
            return lambda out: self._after_matmul(function, args, kwargs["out"], note, mark)
        return lambda out: self._after_matmul(function, args, out, note, mark)

    def _after_matmul(self, function, args, out, note, mark) -> None:
        if note is None:
            self.tracker.opens(function, args, out, mark)
            return
        a, b = (args[position] for position in MATMULS[function])
        transposed = self.tracker.tags.get(a) is not note
        values = a if transposed else b
        head_dim_v = values.shape[-2] if transposed else values.shape[-1]
        note.flops += (
            2.0 * note.rows * note.columns * head_dim_v * (out.numel() / max(1, out.shape[-1] * out.shape[-2]))
        )
        note.bytes += nbytes(a, b, out)
        shape = note.shape if len(note.shape) == 4 else (1, *((1, *a.shape)[-3:-2]), note.rows, note.columns)
        batch, heads = shape[:2]
        family = "sdpa_math" if note.softmax == "_safe_softmax" else "eager"
        expanded = max(note.expanded, self.tracker.expanded.get(values) or 1)
        q, k, v = (batch, heads, note.rows, note.q[-1]), (batch, heads, note.columns, note.q[-1]), None
        v = (batch, heads, note.columns, head_dim_v)
        call = self._note(family, q, k, v, note.dtype, note.device, note.mask, features=note.features)
        call.flops, call.bytes, call.expanded = note.flops, note.bytes, expanded
        call.matrix_shape, call.matrix_dtype, call.matrix_bytes = note.largest
        if call.matrix_shape and len(note.shape) == 4:
            call.matrix_shape = (*note.shape[:2], *call.matrix_shape[-2:])
        call.matrices = note.matrices
        call.declines = self._declined()
        call.start, call.stop = note.start, self._mark(note.device)
        note.call, note.mask = call, None

    def on_attention(self, function, args, kwargs):
        family = families.of_operator(operator_reading.full_name(function))
        named = operator_reading.named(function, args, kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not tensors:
            return None
        device = tensors[0].device
        if families.is_backward(operator_reading.full_name(function)):
            call = next(
                (
                    c
                    for name in ("out", "output", "logsumexp", "softmax_lse")
                    if (c := self._outputs.get(named.get(name)))
                ),
                None,
            )
            mark = self._mark(device)
            return lambda out: call.backwards.append((mark, self._mark(device))) if call else None
        if family.name == "native_mha":
            mark = self._mark(device)
            return lambda out: self._after_native(named, tensors, mark)
        q, k, v = operator_reading.tensors(named, tensors)
        if q is None:
            return None
        before = operator_reading.counted(named) if family.name == "flashpatch" else None
        mark = self._mark(device)
        return lambda out: self._after_attention(function, family, named, (q, k, v), before, mark, out)

    def _after_attention(self, function, family, named, qkv, before, mark, out) -> None:
        q, k, v = qkv
        stop = self._mark(q.device)
        name, kernel, declines = family.name, "", []
        if before is not None:
            name, kernel, declines = operator_reading.ran(named, before)
        heads_last = family.name not in operator_reading.HEADS_SECOND
        shapes = [operator_reading.shape(tensor, heads_last) for tensor in qkv]
        mask = next((named[word] for word in operator_reading.MASKS if isinstance(named.get(word), torch.Tensor)), None)
        causal = bool(named.get("is_causal") or named.get("causal"))
        left, right = (operator_reading.window(named, side) for side in ("left", "right"))
        if family.name == "flashpatch":
            causal = right == 0
        call = self._note(
            name, *shapes, q.dtype, q.device, mask, features=operator_reading.features(named), causal=causal
        )
        call.window = left is not None and left >= 0
        if call.window and call.mask in ("none", "causal"):
            call.mask = (
                f"causal window of {left + 1}" if causal or right == 0 else f"window of {left} before, {right} after"
            )
        call.kernel, call.declines = kernel, declines
        pairs = operator_reading.pairs(named, shapes, causal, left if call.window else None)
        call.flops = 2.0 * shapes[0][1] * pairs * (shapes[0][-1] + shapes[2][-1])
        call.bytes = nbytes(q, k, v, mask, out)
        call.start, call.stop = mark, stop
        call.expanded = max(call.expanded, *(self.tracker.expanded.get(tensor) or 1 for tensor in (k, v)))
        if name == "flex_eager":
            batch, heads, rows, _ = shapes[0]
            call.matrix_shape, call.matrix_dtype = (batch, heads, rows, shapes[1][2]), "float32"
            call.matrix_bytes, call.matrices = 4 * batch * heads * rows * shapes[1][2], 2
            score, blocks = named.get("score_mod"), named.get("block_mask")
            call.mask = "in code (mask_mod)" if blocks is not None else "none"
            call.features |= {"score_mod"} if score is not None else set()
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self._outputs.put(value, call)

    def _declined(self) -> list[str]:
        """Why flashpatch left the running module's call to torch's operators, where it did."""
        frame = self.modules.stack[-1] if self.modules.stack else None
        tag = getattr(frame.module, "_flashpatch", None) if frame else None
        return [] if tag is None else operator_reading.declined_since(tag.layer, frame.declines_before)

    def _after_native(self, named, tensors, mark) -> None:
        """torch's C++ path: on a CPU it spells attention out, on a GPU it chooses."""
        first = tensors[0]
        shapes, dense = operator_reading.native(named), first.device.type == "cpu"
        mask = named.get("mask")
        name = "native_mha_dense" if dense else "native_mha"
        call = self._note(name, *shapes, first.dtype, first.device, mask)
        batch, heads, rows, head_dim = shapes[0]
        columns = shapes[1][2]
        call.flops = 4.0 * batch * heads * rows * columns * head_dim
        call.bytes = nbytes(*tensors)
        if dense:
            call.matrix_shape, call.matrix_dtype = (batch, heads, rows, columns), module_reading.word(first.dtype)
            call.matrix_bytes, call.matrices = batch * heads * rows * columns * first.element_size(), 2
            call.bytes += 4 * call.matrix_bytes
        call.start, call.stop = mark, self._mark(first.device)

    # ---- one call ----

    def _note(self, family, q, k, v, dtype, device, mask, *, features=(), causal=False) -> Call:
        facts, asked = self.modules.facts(), self.asked if family.startswith("sdpa") else None
        if asked is None and family == "sdpa_math":
            asked = _reconstructed(q, k, v, dtype, device, mask, features)
        recompute = torch._C._current_graph_task_id() != -1
        call = Call(
            facts,
            family,
            q,
            k,
            v,
            module_reading.word(dtype),
            str(device),
            recompute,
            causal=causal,
            features=set(features),
        )
        if asked is not None:
            given = asked.mask
            call.causal = asked.is_causal
            call.dtype = module_reading.word(asked.q.dtype)
            if asked.k.dim() == 4:
                call.q, call.k, call.v = (tuple(tensor.shape) for tensor in (asked.q, asked.k, asked.v))
            heads, heads_kv = ((1, *tensor.shape[:-2])[-1] for tensor in (asked.q, asked.k))  # of 2-D tensors: one
            if family in ("sdpa_math", "sdpa_efficient") and heads_kv != heads:
                call.expanded = heads // max(1, heads_kv)
            if asked.dropout_p:
                call.features.add("dropout")
            call.refused = self._why_not(asked, family)
            mask = given
        if isinstance(mask, torch.Tensor):
            call.mask, call.mask_shape = self._kind(mask, call), tuple(mask.shape)
            call.mask_bytes = nbytes(mask)
        elif call.causal:
            call.mask = "causal"
        if device.type == "cpu" and family.startswith("sdpa"):
            call.forecast = sdpa_reasons.forecast(call.q, call.k, call.v, mask, getattr(torch, call.dtype))
        self._check_documents(call, mask)
        self.calls.append(call)
        return call

    def _kind(self, mask: torch.Tensor, call: Call) -> str:
        key = (tuple(mask.shape), mask.stride(), mask.storage_offset(), _version(mask), call.lengths)
        known = self._mask_kinds.get(mask)
        if known is None or known[0] != key:
            known = (key, mask_kinds.kind(mask, *call.lengths))
            self._mask_kinds.put(mask, known)
        return known[1]

    def _check_documents(self, call: Call, mask) -> None:
        """Whether tokens of packed documents see each other's."""
        positions = self.modules.stack[-1].position_ids if self.modules.stack else None
        if positions is None or call.lengths[0] != call.lengths[1]:
            return
        if call.features & {"varlen", "key_ranges"} or call.family in (
            "flex",
            "flex_eager",
            "native_mha",
            "native_mha_dense",
            "unknown",
        ):
            return
        known = self._documents.get(positions)
        if known is None:
            known = (mask_kinds.documents(positions, call.lengths[0]),)
            self._documents.put(positions, known)
        if known[0] is not None:
            call.mixes_documents = mask_kinds.mixes_documents(
                mask, known[0].to(mask.device if mask is not None else "cpu")
            )

    def _why_not(self, asked: Asked, family: str) -> dict[str, str]:
        tensors = (asked.q, asked.k, asked.v, asked.mask)
        key = (
            family, asked.dropout_p > 0, asked.is_causal, asked.enable_gqa, sdpa_reasons.enabled(),
            *((t.shape, t.stride(), t.dtype, t.requires_grad) if t is not None else None for t in tensors),
        )  # fmt: skip
        if key not in self._refusals:
            self._refusals[key] = sdpa_reasons.refusals(
                *tensors, asked.dropout_p, asked.is_causal, asked.enable_gqa, family
            )
        return self._refusals[key]

    def _mark(self, device: torch.device):
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                self.statements["a CUDA graph was captured; its calls have no time, its replays are not seen"] = None
                return None
            self.cuda = True
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; those of inference_mode do not say."""
    return -1 if tensor.is_inference() else tensor._version


def _reconstructed(q, k, v, dtype, device, mask, features) -> Asked:
    """The arguments of a scaled_dot_product_attention that was not called by that name, from what its operators got."""
    tensors = (torch.empty(shape, dtype=dtype, device=device) for shape in (q, k, v))
    causal = (
        isinstance(mask, torch.Tensor) and not mask.requires_grad and mask_kinds.kind(mask, q[-2], k[-2]) == "causal"
    )
    return Asked(*tensors, None if causal else mask, 0.1 if "dropout" in features else 0.0, causal)
