"""`flashpatch audit --all` as a picture: one SVG, or one page with it, that need nothing from outside."""

from __future__ import annotations

from html import escape
from textwrap import wrap

from . import rendering

# status -> fill, edge. Words stand in every cell too, so that nothing hangs on the colours.
COLOURS = {"verified": ("#d3f2d9", "#1a7f37"), "compiled": ("#dbe9fb", "#2f6feb"), "fallback": ("#eeeeee", "#8a8a8a")}
MEANINGS = {
    "verified": "ran on that generation and passed",
    "compiled": "builds for it and passes in the emulator or on another generation, no run of it there is on record",
    "fallback": "no kernel: computed exactly by torch operators",
}
LEFT, CELL, ROW, GAP, MARGIN = 214, 236, 74, 6, 24
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


class _Drawing:
    """SVG elements, from top to bottom."""

    def __init__(self):
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, size: int = 13, weight: int = 400, colour: str = "#1f2328") -> None:
        style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, status: str, title: str = "") -> None:
        fill, edge = COLOURS[status]
        shape = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{edge}"'
        self.parts.append(f"<rect {shape}>{f'<title>{escape(title)}</title>' if title else ''}</rect>")


def svg(report) -> str:
    """The grid of a GridReport: generations down, dtypes across, a word for both directions in each cell."""
    dtypes = list(dict.fromkeys(square.dtype for square in report.squares))
    rows: dict[tuple, dict] = {}
    for square in report.squares:
        key = (square.title, tuple(square.capabilities), tuple(square.gpus), tuple(square.shared_memory))
        rows.setdefault(key, {})[square.dtype, square.direction] = square
    notes: dict[str, int] = {}
    drawing = _Drawing()
    width = 2 * MARGIN + LEFT + len(dtypes) * (CELL + GAP)
    y = _heading(drawing, report, width)
    for column, dtype in enumerate(dtypes):
        drawing.text(MARGIN + LEFT + column * (CELL + GAP) + 10, y, SHORT[dtype], 15, 600)
    y += 10
    for (title, capabilities, gpus, limits), squares in rows.items():
        drawing.text(MARGIN, y + 22, title, 15, 600)
        limit = " or ".join(f"{size / 1024:.0f}" for size in sorted(set(limits)))
        drawing.text(MARGIN, y + 40, f"{', '.join(capabilities)}; {limit} KB a block", 12)
        drawing.text(MARGIN, y + 57, _shortened(", ".join(gpus), 34), 11, colour="#59636e")
        for column, dtype in enumerate(dtypes):
            pair = [squares[dtype, direction] for direction in ("forward", "backward")]
            _cell(drawing, MARGIN + LEFT + column * (CELL + GAP), y, pair, report.modules, notes)
        y += ROW + GAP
    y = _footnotes(drawing, notes, report, y + 16, width)
    height = y + MARGIN
    label = escape(f"Kernels of {report.model} on every GPU generation and dtype")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}" font-family="Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(drawing.parts) + "\n</svg>\n"
    )


def _heading(drawing: _Drawing, report, width: int) -> int:
    from .audit import summary

    drawing.text(MARGIN, 42, f"{report.model}: attention on every generation and dtype", 20, 600)
    drawing.text(MARGIN, 66, summary(report), 13)
    y = 80
    for status, meaning in MEANINGS.items():
        drawing.box(MARGIN, y, 16, 14, status)
        drawing.text(MARGIN + 24, y + 12, f"{status}: {meaning}", 12)
        y += 20
    return y + 24


def _cell(drawing: _Drawing, x: int, y: int, pair, modules: int, notes: dict[str, int]) -> None:
    """Two halves, forward above backward; a number leads to the reason below."""
    half = ROW // 2
    for index, square in enumerate(pair):
        top = y + index * half
        whole = "\n".join(_line(tally, modules) for tally in square.tallies)
        drawing.box(x, top, CELL, half - 2, square.status, f"{square.direction}: {whole}")
        tally = max(square.tallies, key=lambda tally: tally.modules, default=None)
        if tally is None:
            drawing.text(x + 10, top + 22, "its own attention", 12)
            continue
        choice = tally.choice
        marks = [notes.setdefault(reason, len(notes) + 1) for reason in choice.reasons]
        mark = f" [{', '.join(map(str, marks))}]" if marks else ""
        others = f", {tally.modules} of {modules} modules" if tally.modules < modules else ""
        drawing.text(x + 10, top + 15, f"{choice.kernel or 'fallback'}{mark}{others}", 12, 600)
        size = f", {rendering.kilobytes(choice.shared_memory)}" if choice.kernel else ""
        tile = choice.tile.replace(" warps", "w").replace(" stages", "s").replace(" stage", "s").replace(", ", " ")
        words = f"{tile}{size}, {choice.status}" if choice.kernel else square.direction
        drawing.text(x + 10, top + 29, words, 11, colour="#444c56")


def _footnotes(drawing: _Drawing, notes: dict[str, int], report, y: int, width: int) -> int:
    from .audit import undispatched

    drawing.text(
        MARGIN,
        y,
        "In each cell forward above, backward below: kernel; queries x keys of a block, warps, stages, shared memory.",
        12,
    )
    y += 20
    lines = [f"[{number}] {reason}" for reason, number in notes.items()]
    lines += undispatched(report)
    for line in lines:
        for part in wrap(line, max(40, (width - 2 * MARGIN) // 7)):
            drawing.text(MARGIN, y, part, 12)
            y += 17
    return y


def _line(tally, modules: int) -> str:
    choice = tally.choice
    size = f", {rendering.kilobytes(choice.shared_memory)}" if choice.kernel else ""
    words = [
        f"{tally.modules} of {modules}",
        f"{choice.kernel or 'fallback'}{f' {choice.tile}' if choice.tile else ''}{size}",
    ]
    return f"{words[0]}: {words[1]}, {choice.status}{''.join(f'; {reason}' for reason in choice.reasons)}"


def _shortened(words: str, length: int) -> str:
    return words if len(words) <= length else words[: words.rfind(", ", 0, length - 3)] + ", ..."


COLUMNS = (
    "generation", "block may have", "dtype", "direction", "modules", "runs on", "tile", "shared memory", "status", "why",
)  # fmt: skip


def _limits(square) -> str:
    """What a block may have; where capabilities that decide alike differ in it, of each."""
    having: dict[int, list[str]] = {}
    for number, size in zip(square.capabilities, square.shared_memory, strict=True):
        having.setdefault(size, []).append(number)
    if len(having) == 1:
        return rendering.kilobytes(*having)
    return ", ".join(f"{rendering.kilobytes(size)} ({', '.join(numbers)})" for size, numbers in having.items())


def lines(report) -> list[list[str]]:
    """Every cell in words, in the order of COLUMNS; dtypes, and then directions, that run alike in one line."""
    groups: dict[tuple, list] = {}
    for square in report.squares:
        for tally in square.tallies or [None]:
            choice, count = (None, 0) if tally is None else (tally.choice, tally.modules)
            size = rendering.kilobytes(choice.shared_memory) if choice and choice.kernel else ""
            line = ("its own", "", "", "", "")
            if choice:
                line = (choice.kernel or "fallback", choice.tile, size, choice.status, "; ".join(choice.reasons))
            where = (f"{square.title} ({', '.join(square.capabilities)})", _limits(square))
            groups.setdefault((*where, square.direction, count, line), []).append(square.dtype)
    both: dict[tuple, list] = {}
    for (*where, direction, count, line), dtypes in groups.items():
        both.setdefault((*where, ", ".join(dtypes), count, line), []).append(direction)
    return [
        [title, limit, dtypes, ", ".join(directions), f"{count} of {report.modules}", *line]
        for (title, limit, dtypes, count, line), directions in both.items()
    ]


def html(report) -> str:
    """A page with the picture and every cell of it in words."""
    from . import html as pages
    from .audit import summary, undispatched

    return pages.render(
        "grid.html.jinja", title=report.model, summary=summary(report), reasons=undispatched(report), picture=svg(report),
        columns=COLUMNS, lines=lines(report),
    )  # fmt: skip
