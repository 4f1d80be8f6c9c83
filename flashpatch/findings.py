"""Silent losses in what a trace saw: results that may be wrong, attention that runs slower than it could, and budgets.

`wrong`: the result differs from what the model's own definition says. `slow`: it is right, and not a flash kernel.
`note`: it runs well here, and something about it is worth knowing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from . import families
from .observations import Call

LEVELS = ("wrong", "slow", "note")
# Fused attention that has no softcap and no sinks by its interface.
_PLAIN = (
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "sdpa_math",
    "sdpa_flash_cpu",
    "sdpa_overrideable",
    "native_mha",
    "native_mha_dense",
)

# How the trace says that it could not read a call.
UNREADABLE = "a call ran that the trace could not read"
# What a budget that was checked on a CPU does not say.
ON_A_CPU = "what a GPU would run: these calls ran on a CPU, with its own kernels and limits; run the same line on the GPU to know"


@dataclass(frozen=True)
class Finding:
    """One loss that nothing else reports."""

    level: Annotated[str, "wrong, slow or note"]
    code: Annotated[str, "a stable name"]
    path: Annotated[str, "the module it happened in"]
    text: Annotated[str, "what happened and why"]


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def find(calls: list[Call], attentions_missing: list[str], uncompiled: list[str]) -> list[Finding]:
    """Every loss in these calls, the worst first, each once per module."""
    found: dict[tuple[str, str], Finding] = {}

    def add(level: str, code: str, path: str, text: str) -> None:
        found.setdefault((code, path), Finding(level, code, path, text))

    patched = {call.facts.root for call in calls if call.facts.function_of == "flashpatch"}
    for call in calls:
        facts = call.facts
        unlike = facts.function_of != "flashpatch" and facts.implementation == facts.root_implementation
        if facts.implementation and facts.root in patched and unlike:
            text = f"another part of the model is patched, this part's configuration says {call.facts.implementation!r}"
            add("slow", "left_behind", call.facts.path, f"{text}: it ran {_title(call)}")
        for level, code, text in (*_wrong(call), *_slow(call), *_notes(call)):
            add(level, code, call.facts.path, text)
    for path in attentions_missing:
        text = (
            "output_attentions was asked for, and the attention weights came back empty; only eager attention has them"
        )
        add("wrong", "output_attentions", path, text)
    for path in uncompiled:
        add(
            "note", "not_attributed", path, "it is compiled as a whole, so its attention is named by order of execution"
        )
    return sorted(found.values(), key=lambda finding: LEVELS.index(finding.level))


def _wrong(call: Call):
    facts, plain = call.facts, call.family in _PLAIN
    takes_none = plain or (call.family in ("flash_attn", "xformers", "eager") and not facts.compiled)
    if facts.softcap and takes_none and "softcap" not in call.features:
        yield (
            "wrong",
            "softcap_ignored",
            f"{facts.class_name} caps its scores at {facts.softcap:g}, and {_title(call)} got no softcap",
        )
    if facts.sinks and takes_none and "sinks" not in call.features:
        yield "wrong", "sinks_ignored", f"{facts.class_name} has attention sinks, and {_title(call)} got none"
    if facts.window and call.lengths[1] > facts.window and not call.window and call.mask in ("none", "causal"):
        text = (
            f"{facts.class_name} attends to a window of {facts.window} keys; {_title(call)} got {call.lengths[1]} keys and "
            "neither a window nor a mask"
        )
        if call.family not in (
            "flex",
            "flex_eager",
            "native_mha",
            "native_mha_dense",
            "flashpatch",
            "flashpatch_fallback",
            "unknown",
        ):
            yield "wrong", "window_ignored", text
    if facts.mask_registered is False:
        yield (
            "wrong",
            "mask_function_missing",
            f"attn_implementation {facts.implementation!r} has an attention function and no mask function, so transformers "
            "builds no mask: padding, windows and packing are ignored (AttentionMaskInterface.register under the same name)",
        )
    if call.mixes_documents:
        yield (
            "wrong",
            "packed_contamination",
            "position_ids mark several packed documents in a row, and tokens attend across their borders "
            f"(mask: {call.mask}); pass use_cache=False and no attention_mask, or cu_seq_lens",
        )


def _slow(call: Call):
    facts = call.facts
    family = families.BY_NAME[call.family]
    matrix = f"a matrix of {list(call.matrix_shape)} {call.matrix_dtype} ({size(call.matrix_bytes)})"
    if call.family == "eager" and call.declines:
        text = f"flashpatch left it to torch's operators, {matrix} in memory: {'; '.join(call.declines)}"
        yield "slow", "declined", text
    elif call.family == "eager" and facts.dispatches and facts.function_of == "user":
        text = f"the registered attention function {facts.implementation!r} computes it with torch operators: {matrix} in memory"
        yield "slow", "eager", text
    elif call.family == "eager":
        if facts.implementation not in (None, "eager") or facts.dispatches is False:
            text = (
                f"{facts.class_name} computes attention itself, whatever the configuration says "
                f"(attn_implementation {facts.implementation!r}): {matrix} in memory"
            )
            if facts.read:
                text += "; flashpatch.apply(model) reads it there"
            yield "slow", "hard_coded", text
        else:
            why = ""
            if facts.implementation == "eager":
                why = "attn_implementation is 'eager'"
                if facts.supports_sdpa is False:
                    why += ", because this model class does not support sdpa; transformers chooses it silently"
                why = f" ({why})"
            yield "slow", "eager", f"matmul, softmax, matmul{why}: {matrix} in memory"
    elif call.family == "flex_eager":
        text = f"FlexAttention outside torch.compile runs as dense operators: {matrix} in memory; torch.compile it"
        yield "slow", "flex_not_compiled", text
    elif call.family in ("sdpa_math", "sdpa_efficient"):
        code = "sdpa_math" if call.family == "sdpa_math" else "sdpa_efficient"
        reasons = "; ".join(f"{name} was not taken: {text}" for name, text in call.refused.items())
        held = f": {matrix} in memory" if call.matrix_bytes else ""
        yield "slow", code, f"SDPA ran its {code.removeprefix('sdpa_')} backend{held}. {reasons}".rstrip()
    if call.expanded > 1 and call.family != "eager":
        text = (
            f"each key and value head was copied {call.expanded} times before attention (grouped-query attention "
            "spelled out in memory)"
        )
        yield "slow", "heads_expanded", text
    sdpa = call.family in _PLAIN and not call.family.startswith("native")
    if call.mask == "causal" and call.mask_shape and sdpa and call.lengths[0] > 1:
        where = " by the compiled model" if facts.compiled else ""
        text = (
            f"a dense mask {list(call.mask_shape)} ({size(call.mask_bytes)}) was made{where} that says only 'causal'; with "
            "is_causal=True and no mask, FlashAttention takes the call"
        )
        yield "slow", "mask_materialised", text
    if call.mask == "hides nothing" and call.mask_shape and sdpa and call.lengths[0] > 1:
        text = f"a dense mask {list(call.mask_shape)} that hides nothing (or a bias of zeros) keeps FlashAttention from taking the call"
        yield "slow", "mask_materialised", text
    if call.dtype in ("float32", "float64") and facts.weights in ("float16", "bfloat16") and family.kind != "unknown":
        text = (
            f"q, k and v are {call.dtype} although the module's weights are {facts.weights}: something before attention (a norm, a "
            "rotary embedding) cast them up, and FlashAttention takes 16 bits only"
        )
        yield "slow", "upcast", text
    if call.declines and call.family != "eager":
        yield "slow", "declined", f"flashpatch ran its fallback: {'; '.join(call.declines)}"
    ours, root = facts.implementation, facts.root_implementation
    if ours and root and ours != root and call.family not in ("flashpatch", "flashpatch_fallback"):
        text = f"the model's configuration says {root!r}, this part's still says {ours!r}: it ran {_title(call)}"
        yield "slow", "left_behind", text


def _notes(call: Call):
    if call.family == "native_mha_dense":
        text = (
            f"torch's C++ path for nn.MultiheadAttention in eval mode spells attention out on a CPU: a matrix of "
            f"{list(call.matrix_shape)} {call.matrix_dtype} ({size(call.matrix_bytes)}) in memory; "
            "torch.backends.mha.set_fastpath_enabled(False) takes scaled_dot_product_attention"
        )
        yield "note", "native_path", text
    if call.family == "native_mha":
        text = "torch's C++ path chooses inside one operator; trace(profile=True) shows by its kernels what it chose"
        yield "note", "native_path", text
    if call.family == "unknown":
        text = "an operator named after attention that flashpatch does not know: whether it holds the score matrix is not known"
        yield "note", "unknown_attention", text
    if call.forecast:
        yield "note", "forecast", _forecast(call.forecast)


def _forecast(reasons: str) -> str:
    return f"on an NVIDIA GPU FlashAttention would not take this call: {reasons}"


def _title(call: Call) -> str:
    return families.BY_NAME[call.family].title


def grouped(found: list[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings that say the same of several modules, as one and the modules' paths."""
    groups: dict[tuple, tuple[Finding, list[str]]] = {}
    for finding in found:
        _, paths = groups.setdefault((finding.level, finding.code, finding.text), (finding, []))
        paths.extend([finding.path] if finding.path else [])
    return list(groups.values())


def places(paths: list[str]) -> str:
    """Some of these modules by name, and how many there are."""
    if len(paths) <= 1:
        return "".join(paths)
    return f"{paths[0]} and {len(paths) - 1} more"


# ---- budgets ----


@dataclass(frozen=True)
class Violation:
    """One line of a budget that does not hold."""

    rule: Annotated[str, "the option, as typed"]
    path: Annotated[str, "the module that broke it"]
    text: Annotated[str, "what ran there and why"]


def violations(report, expect: str = "", forbid: str = "", max_declines: int | None = None) -> list[Violation]:
    """What in a TraceReport breaks a budget. `expect` and `forbid` are words that `families.expand` knows, with commas.

    `expect="flash"` does not hold on a CPU either where FlashAttention could not take the call on a GPU.
    Raises ValueError for a word that is not known.
    """
    allowed, on_cpu = families.allowed(expect) if expect else (None, True)
    banned = set().union(*map(families.expand, forbid.split(","))) if forbid else set()
    broken, reasons = [], {}
    for finding in report.findings:
        if finding.level != "note":
            reasons.setdefault(finding.path, finding.text)
    for row in report.rows:
        text = f"ran {families.BY_NAME[row.family].title}"
        if why := reasons.get(row.path):
            text += f": {why}"
        if allowed is not None and row.family not in allowed:
            broken.append(Violation(f"--expect {expect}", row.path, text))
        elif row.family == "sdpa_flash_cpu" and row.forecast and not on_cpu:
            broken.append(
                Violation(f"--expect {expect}", row.path, f"ran torch's CPU kernel, and {_forecast(row.forecast)}")
            )
        elif row.family in banned:
            broken.append(Violation(f"--forbid {forbid}", row.path, text))
    asked = f"--expect {expect}" if expect else f"--forbid {forbid}" if forbid else f"--max-declines {max_declines}"
    if expect or forbid or max_declines is not None:  # what is not known does not hold
        broken += [Violation(asked, "", text) for text in report.statements if text.startswith(UNREADABLE)]
    if allowed is not None and not report.rows:
        broken.append(Violation(f"--expect {expect}", "", "no attention was seen at all"))
    if max_declines is not None:
        declined = [row for row in report.rows if row.declines or row.family == "flashpatch_fallback"]
        count = sum(row.calls + row.recomputes for row in declined)
        if count > max_declines:
            path, why = declined[0].path, "; ".join(declined[0].declines)
            broken.append(Violation(f"--max-declines {max_declines}", path, f"{count} calls declined: {why}"))
    return broken


def grouped_violations(broken: list[Violation]) -> list[tuple[Violation, list[str]]]:
    """Violations that say the same of several modules, as one and the modules' paths."""
    groups: dict[tuple, tuple[Violation, list[str]]] = {}
    for violation in broken:
        groups.setdefault((violation.rule, violation.text), (violation, []))[1].append(violation.path)
    return list(groups.values())
