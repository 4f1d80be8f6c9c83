"""What attention costs in a model at a context length: FLOPs, bytes, memory, and on a measured GPU time and money.

Counted from the attention calls of one forward without values, so grouped heads, windows, chunks and layers that are no
attention come out as the model has them. Nothing runs and no weights are loaded.

Two ways are priced. *With a kernel*: the scores stay on chip; every tensor crosses the memory bus once; the backward
computes the scores again. *Without*: transformers' eager attention, `softmax(q k^T + mask, fp32).to(dtype) v`, whose
N x N matrices are written and read, and computed in full where the mask hides half of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated

from . import dry_runs, planning
from .call_costs import Ceilings, cache_bytes, ceilings, kinds_of, largest_batch, largest_context, totals
from .problem import Decline

ELEMENT_BYTES = {**planning.ELEMENT_BYTES, "float64": 8}


# ---- what is reported ----


@dataclass(frozen=True)
class LayerKind:
    """Attention calls of one forward that are alike."""

    count: Annotated[int, "calls of one forward"]
    mask: Annotated[str, "full, causal, window W or chunk C"]
    num_heads_q: Annotated[int, "query heads"]
    num_heads_kv: Annotated[int, "key/value heads; fewer than query heads: GQA"]
    head_dim: Annotated[int, "of q and k"]
    head_dim_v: Annotated[int, "of v"]
    seqlen_q: Annotated[int | None, "rows, if they do not follow the context"]
    seqlen_k: Annotated[int | None, "keys, if they do not follow the context"]
    example: Annotated[str, "the first module that makes such a call"]
    declines: Annotated[list[str], "why no kernel takes it on this GPU, as code: text"]


@dataclass(frozen=True)
class Way:
    """All attention of the model one way, for one batch."""

    forward_flops: Annotated[float, "floating-point operations of the matrix products, a multiply-add being two"]
    backward_flops: Annotated[float, "the same for the gradients, recomputed scores included"]
    forward_bytes: Annotated[float, "least traffic to GPU memory"]
    backward_bytes: Annotated[float, "least traffic to GPU memory"]
    forward_milliseconds: Annotated[float | None, "at the measured ceilings; without a kernel a lower bound"]
    backward_milliseconds: Annotated[float | None, "the same for the backward"]
    working_bytes: Annotated[float, "memory beside q, k, v and out in the forward of one layer"]
    saved_bytes: Annotated[
        float, "what training keeps of attention for the backward, all layers, beside q, k, v and out"
    ]
    forward_price: Annotated[float | None, "of one forward's attention"]
    training_price: Annotated[float | None, "of one forward's and backward's attention"]
    largest_batch: Annotated[int | None, "sequences of this context that fit, with weights and KV cache; 0: not one"]


@dataclass(frozen=True)
class ContextCost:
    """One context length."""

    context: Annotated[int, "tokens of a sequence"]
    scores: Annotated[int, "entries of one head's full score matrix, context x context"]
    score_matrix_bytes: Annotated[int, "its bytes in the model's dtype"]
    visible: Annotated[float, "share of all heads' score matrices that the masks let through"]
    kv_cache_bytes: Annotated[float, "keys and values of one sequence, windowed layers as long as their window"]
    decode_milliseconds: Annotated[float | None, "reading that cache, which every next token of a sequence does"]
    share_of_forward: Annotated[
        float, "attention's share of the forward's FLOPs; the rest counts as 2 x active parameters x tokens"
    ]
    with_kernel: Annotated[Way, "tiled, the matrix never stored"]
    without: Annotated[Way, "eager attention"]


@dataclass(frozen=True)
class CostReport:
    """`flashpatch cost`."""

    model: Annotated[str, "the model's class, or the name it was given by"]
    dtype: Annotated[str, "dtype of q, k, v"]
    batch: Annotated[int, "sequences at once"]
    parameters: Annotated[int, "of the whole model"]
    active_parameters: Annotated[int, "those a token is multiplied by: no looked-up embeddings, of experts the chosen"]
    weights_bytes: Annotated[int, "of the whole model"]
    ceilings: Annotated[Ceilings, "the GPU"]
    price_per_gpu_hour: Annotated[float | None, "as given"]
    layers: Annotated[list[LayerKind], "attention calls of one forward"]
    other_layers: Annotated[dict[str, int], "token-mixing layers that are no attention, not counted here"]
    undispatched: Annotated[list[str], "attention modules whose calls could not be seen, not counted here"]
    contexts: Annotated[list[ContextCost], "one entry per context length"]
    largest_context_with_kernel: Annotated[int | None, "tokens of one sequence that fit, in steps of 1024, up to 16M"]
    largest_context_without: Annotated[int | None, "the same for eager attention"]
    statement: Annotated[str, "how the compute grows, in sentences"]
    notes: Annotated[list[str], "what the figures leave out"]


# ---- the report ----


def cost(
    model,
    *,
    gpu: str = "h200",
    contexts: tuple[int, ...] = (8192, 131072, 1048576),
    batch: int = 1,
    dtype: str | None = None,
    price_per_gpu_hour: float | None = None,
    tflops: float | None = None,
    bandwidth: float | None = None,
    memory: float | None = None,
    **load,
) -> CostReport:
    """What attention of `model` (a module, a configuration, a hub id or a folder) costs at each context length.

    `tflops`, `bandwidth` (TB/s) and `memory` (GiB) stand for a GPU that nobody measured, or replace what was.
    Raises ValueError for an unknown GPU, models.ModelError.
    """
    limits, speeds = ceilings(gpu, tflops=tflops, bandwidth=bandwidth, memory=memory)
    facts = dry_runs.facts(model, dtype=dtype, **load)
    kinds = kinds_of(facts)
    if kinds and not any(kind.follows for kind in kinds):
        contexts = (max(kind.seqlen_q for kind in kinds),)
    element_type = next((kind.problem.dtype for kind in kinds), dtype or "bfloat16")
    element = ELEMENT_BYTES[element_type]
    if element > 2 and not tflops:
        limits, speeds = replace(limits, matmul_tflops=None), {}  # what was measured is of 16 bits
    device = planning.gpu(gpu)
    price = None if price_per_gpu_hour is None else price_per_gpu_hour / 3.6e6  # of a millisecond
    found = []
    for context in contexts:
        ways = []
        for kernel in (True, False):
            way = totals(kinds, context, batch, element, kernel, limits, speeds)
            forward, backward = way["forward_milliseconds"], way["backward_milliseconds"]
            known = price is not None and forward is not None
            defaults = dict.fromkeys(("forward_flops", "backward_flops", "forward_bytes", "backward_bytes"), 0.0)
            ways.append(
                Way(**{
                    **defaults, "working_bytes": 0.0, "saved_bytes": 0.0, **way,
                    "forward_price": price * forward if known else None,
                    "training_price": price * (forward + backward) if known else None,
                    "largest_batch": largest_batch(kinds, context, element, kernel, limits, facts.parameter_bytes),
                })
            )  # fmt: skip
        cache = cache_bytes(kinds, context, element)
        squares = sum(len(p) * k.heads_q * math.prod(k.lengths(context)) for k, p in kinds.items())
        seen = sum(len(p) * k.heads_q * k.pairs(context) for k, p in kinds.items())
        own = ways[0].forward_flops
        rest = 2.0 * facts.active_parameters * context * batch
        found.append(
            ContextCost(
                context,
                context * context,
                context * context * element,
                seen / squares if squares else 0.0,
                cache,
                None if limits.bandwidth_tb_s is None else cache / limits.bandwidth_tb_s / 1e9,
                own / (own + rest) if own + rest else 0.0,
                *ways,
            )
        )
    layers = []
    for kind, paths in kinds.items():
        decision = planning.resolve(kind.problem, device)
        reasons = [f"{r.code}: {r.text}" for r in decision.reasons] if isinstance(decision, Decline) else []
        layers.append(
            LayerKind(
                len(paths), kind.mask, kind.heads_q, kind.heads_kv, kind.head_dim, kind.head_dim_v, kind.seqlen_q,
                kind.seqlen_k, paths[0], reasons,
            )
        )  # fmt: skip
    listed = getattr(facts.config, "layer_types", None) or getattr(facts.config, "layers_block_type", None) or ()
    others = Counter(name for name in listed if "attention" not in name or name == "linear_attention")
    return CostReport(
        model if isinstance(model, str) else type(model).__name__,
        element_type,
        batch,
        facts.parameters,
        facts.active_parameters,
        facts.parameter_bytes,
        limits,
        price_per_gpu_hour,
        layers,
        dict(others),
        facts.undispatched,
        found,
        largest_context(kinds, element, True, limits, facts.parameter_bytes),
        largest_context(kinds, element, False, limits, facts.parameter_bytes),
        _statement(found, kinds),
        _notes(kinds, limits, speeds, facts.config, contexts, element_type),
    )


def _statement(found: list[ContextCost], kinds: dict) -> str:
    if not kinds:
        return "No attention call was seen, so there is nothing to count."
    if not any(kind.follows for kind in kinds):
        return "The lengths of every call are the model's own (an image's patches), so a context changes nothing."
    text = (
        "Attention's compute is quadratic in the context wherever a layer sees all of it: twice the context is four times "
        "the work. A kernel keeps the N x N matrix out of memory; it does not save its products."
    )
    windowed = sum(len(paths) for kind, paths in kinds.items() if kind.chunk or kind.left >= 0)
    total = sum(map(len, kinds.values()))
    if windowed:
        text += f" {windowed} of {total} calls have a window or chunk, whose work grows with the context and no faster."
    if len(found) > 1 and found[0].with_kernel.forward_flops:
        longer = found[-1].context / found[0].context
        work = found[-1].with_kernel.forward_flops / found[0].with_kernel.forward_flops
        text += f" Here {_rounded(longer)} times the context is {_rounded(work)} times the forward's FLOPs."
    return text


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _notes(kinds: dict, limits: Ceilings, speeds: dict, config, contexts, dtype: str) -> list[str]:
    if not kinds:
        return []
    notes = [
        "Memory that must fit: weights, KV cache, and attention's own of one layer. Other activations are not counted.",
        "Without a kernel, times and bytes are the least eager attention can take: each pass at full bandwidth.",
    ]
    if limits.matmul_tflops is None or limits.bandwidth_tb_s is None:
        lacking = [
            ("--tflops", limits.matmul_tflops),
            ("--bandwidth", limits.bandwidth_tb_s),
            ("--memory", limits.memory_bytes),
        ]
        options = [option for option, value in lacking if value is None]
        gains = "times and money" if limits.memory_bytes is not None else "times, money and fit"
        notes.append(f"No ceilings of {limits.gpu} in {dtype} are on record; give {' and '.join(options)} for {gains}.")
    elif not speeds:
        notes.append(
            "Times are at the given ceilings as if attention reached the matrix product's; expect it to take longer."
        )
    if any(not kind.chunk and "key_ranges" in kind.problem.features for kind in kinds):
        notes.append("Ranges of keys that the inputs decide (documents, padding) count as if every key were seen.")
    if speeds and any(kind.chunk or kind.left >= 0 for kind in kinds):
        notes.append("Windows and chunks are timed at the rate of causal calls of that length; they reach less.")
    if getattr(config, "kv_lora_rank", None):
        notes.append(
            "The KV cache is transformers' own, of expanded keys and values; engines that keep the latent need less."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and max(contexts) > positions:
        notes.append(f"The configuration has positions for {positions} tokens; what is longer is counted all the same.")
    return notes
