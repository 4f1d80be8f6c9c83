"""What a trace saw: one row for all calls of a module that were alike, the findings, and how it is printed as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from . import families, findings
from .findings import Finding, Violation
from .profiles import ProfileReport


@dataclass
class Attention:
    """All calls of one module that were alike. Shapes are [batch, heads, seqlen, head_dim]."""

    path: Annotated[str, "the module's name in the outermost module called; empty outside any module"]
    module: Annotated[str, "its class"]
    family: Annotated[str, "what computed it: eager, sdpa_flash, sdpa_math, flashpatch, ..."]
    kind: Annotated[str, "flash, fused (tiled, another algorithm), dense (the whole matrix in memory) or unknown"]
    kernel: Annotated[str, "flashpatch's kernel, where one ran"]
    compiled: Annotated[bool, "inside a torch.compile'd module, where calls are named by order of execution"]
    calls: Annotated[int, "forward calls"]
    recomputes: Annotated[int, "forwards run again inside a backward"]
    backward_calls: Annotated[int, "backward calls"]
    q: Annotated[list[int], "shape of q"]
    k: Annotated[list[int], "shape of k"]
    v: Annotated[list[int], "shape of v"]
    dtype: Annotated[str, "dtype of q, k, v"]
    device: Annotated[str, "where it ran"]
    mask: Annotated[str, "none, causal, padding, bias, ...: what the mask says, read from its values"]
    mask_shape: Annotated[list[int], "shape of the dense mask; empty without one"]
    causal: Annotated[bool, "asked for by a flag, not by a mask"]
    features: Annotated[list[str], "softcap, sinks, dropout, varlen, ..."]
    milliseconds: Annotated[float | None, "of all its forwards, the dispatch of the trace included"]
    backward_milliseconds: Annotated[float | None, "of all its backwards; null where they are not one operator"]
    flops: Annotated[float, "of all its forwards, causal ones counted as the half that is computed"]
    bytes: Annotated[int, "read and written by its forwards' operators"]
    matrix_shape: Annotated[list[int], "largest score matrix held in memory; empty: none was"]
    matrix_dtype: Annotated[str, "its dtype"]
    matrix_bytes: Annotated[int, "its size"]
    matrices: Annotated[int, "tensors of that shape made per call"]
    heads_expanded: Annotated[int, "copies made of each key and value head"]
    refused: Annotated[dict[str, str], "SDPA: faster backend -> why torch did not take it, in its words"]
    forecast: Annotated[str, "on a CPU: why FlashAttention would not take the call on an NVIDIA GPU; empty if it may"]
    declines: Annotated[list[str], "flashpatch: why no kernel took the call"]


@dataclass
class TraceReport:
    """What a trace saw."""

    device: Annotated[str, "the GPU's name, or CPU"]
    torch: Annotated[str, "torch's version"]
    rows: Annotated[list[Attention], "every attention, in order of first appearance"]
    findings: Annotated[list[Finding], "silent losses, the worst first"]
    operators: Annotated[int, "operators that went through the trace"]
    wall_milliseconds: Annotated[float, "of the whole block"]
    overhead_milliseconds: Annotated[float, "of it in the trace itself; outside the block there is no overhead"]
    statements: Annotated[list[str], "what was not seen, or only in part"]
    profile: Annotated[ProfileReport | None, "the same by kernel names, with profile=True"] = None
    violations: Annotated[list[Violation], "what breaks the budget asked for"] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether no finding says wrong or slow."""
        return all(finding.level == "note" for finding in self.findings)

    def add_profile(self, profile: ProfileReport) -> None:
        """Put the profiler's view beside the trace's; what only kernels show becomes a finding."""
        self.profile = profile
        # on a GPU both kinds of spelled-out attention are the same kernels
        seen = {"eager" if row.family == "sdpa_math" and profile.gpu else row.family for row in self.rows}
        for item in profile.families:
            if profile.gpu and item.family not in seen:
                text = f"{item.title} ran ({item.calls + item.backward_calls} kernels) without an operator that the trace sees"
                level = "slow" if item.verdict == "dense" else "note"
                self.findings.append(Finding(level, "only_profiler", "", text))

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            where = row.path or "attention"
            held = f", held {row.matrix_shape} {row.matrix_dtype}" if row.matrix_bytes else ""
            title = families.BY_NAME[row.family].title
            calls = f"{row.calls} call{'s' * (row.calls != 1)}"
            lines.append(
                f"{where}: {title}, {calls}, q {row.q} {row.dtype}, mask {row.mask}{held}"
                + "".join(f"\n    not {name}: {text}" for name, text in row.refused.items())
            )
        for finding, paths in findings.grouped(self.findings):
            lines.append(
                f"{finding.level.upper()} {finding.code}: {findings.places(paths)}: {finding.text}".replace(": :", ":")
            )
        lines = lines or ["no attention was seen"]
        return "\n".join((*lines, *(f"not seen: {statement}" for statement in self.statements)))
