"""Drawings as SVG text: lines over a logarithmic axis, and a roofline. They are readable in light and in dark."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

COLOURS = ("#2f9e6b", "#3b82d6", "#c98a1b", "#9a6cf0", "#e0524a", "#1fa2b8", "#8b95a1", "#e05597")
WIDTH, HEIGHT = 520, 380
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 52, 50


class _Axes:
    """A plot area with logarithmic axes from the extent of the data."""

    def __init__(self, xs: list[float], ys: list[float]):
        self.x0, self.x1 = _extent(xs)
        self.y0, self.y1 = _extent(ys)

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.x0) / (self.x1 - self.x0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _extent(values: list[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.08 * (high - low), 0.05)
    return low - room, high + room


def lines(title: str, x_label: str, y_label: str, series: dict[str, list[tuple[float, float]]]) -> str:
    """One line per name through its (x, y) points, both axes logarithmic."""
    points = [point for values in series.values() for point in values]
    if not points:
        return ""
    axes = _Axes([x for x, _ in points], [y for _, y in points])
    parts = [*_frame(axes, title, x_label, y_label, ticks=sorted({x for x, _ in points}))]
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in sorted(values))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3.5" fill="{colour}"><title>'
            f"{escape(name)}: {_number(x)}, {y:.4g}</title></circle>"
            for x, y in values
        ]
    return _svg(parts, title, list(series))


def roofline(title: str, compute: float, bandwidth: float, points: dict[str, list[tuple[float, float]]]) -> str:
    """TFLOP/s over FLOPs per byte: the measured ceilings (TFLOP/s, GB/s) and each variant's points."""
    every = [point for values in points.values() for point in values]
    ridge = compute * 1e3 / bandwidth
    xs = [ridge, *(x for x, _ in every)]
    low = min(xs) / 2
    axes = _Axes([low, max(xs) * 2], [compute, *(y for _, y in every), low * bandwidth / 1e3])
    corner = (axes.x(ridge), axes.y(compute))
    start = (axes.x(low), axes.y(low * bandwidth / 1e3))
    end = (axes.x(max(xs) * 2), corner[1])
    parts = _frame(axes, title, "FLOPs per byte moved", "TFLOP/s")
    roof = " ".join(f"{x:.1f},{y:.1f}" for x, y in (start, corner, end))
    parts.append(f'<polyline points="{roof}" fill="none" stroke="currentColor" stroke-width="2.5"/>')
    parts.append(f'<text x="{LEFT}" y="40">ceilings measured: {compute:.4g} TFLOP/s, {bandwidth:.4g} GB/s</text>')
    for index, (name, values) in enumerate(points.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts += [
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="5" fill="{colour}" fill-opacity="0.8"><title>'
            f"{escape(name)}: {x:.4g} FLOPs per byte, {y:.4g} TFLOP/s</title></circle>"
            for x, y in values
        ]
    return _svg(parts, title, list(points))


def _frame(axes: _Axes, title: str, x_label: str, y_label: str, ticks: list[float] | None = None) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<text x="{LEFT}" y="20" font-weight="600">{escape(title)}</text>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="14" y="{(TOP + bottom) / 2}" text-anchor="middle" transform="rotate(-90 14 {(TOP + bottom) / 2})">{escape(y_label)}</text>',
    ]
    for value in ticks or _decades(axes.x0, axes.x1):
        parts.append(
            f'<line x1="{axes.x(value):.1f}" x2="{axes.x(value):.1f}" y1="{TOP}" y2="{bottom}" stroke="currentColor" stroke-opacity="0.15"/>'
        )
        parts.append(f'<text x="{axes.x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{_number(value)}</text>')
    for value in _decades(axes.y0, axes.y1):
        parts.append(
            f'<line x1="{LEFT}" x2="{right}" y1="{axes.y(value):.1f}" y2="{axes.y(value):.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
        )
        parts.append(f'<text x="{LEFT - 7}" y="{axes.y(value) + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    parts.append(
        f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>'
    )
    return parts


def _decades(low: float, high: float) -> list[float]:
    """Round numbers inside 10^low to 10^high: powers of ten, with 2 and 5 between where there are few."""
    steps = (1,) if high - low > 3 else (1, 2, 5) if high - low > 0.7 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    values = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in values if low <= math.log10(value) <= high]


def _number(value: float) -> str:
    if value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value / (1 << 20):.0f}M"
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k"
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:g}"


def _svg(parts: list[str], title: str, names: list[str]) -> str:
    """The drawing with a legend below it, two names a row."""
    legend, rows = [], (len(names) + 1) // 2
    for index, name in enumerate(names):
        x, y = LEFT + (index % 2) * 215, HEIGHT + 14 + (index // 2) * 21
        legend.append(f'<circle cx="{x}" cy="{y - 5}" r="5" fill="{COLOURS[index % len(COLOURS)]}"/>')
        legend.append(f'<text x="{x + 11}" y="{y}">{escape(name)}</text>')
    height = HEIGHT + 12 + rows * 21
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="14" fill="currentColor" color="inherit">'
        + "".join([*parts, *legend])
        + "</svg>"
    )


def standalone(svg: str) -> str:
    """The same as a file of its own: black on white."""
    opening, _, rest = svg.partition(">")
    opening = opening.replace('color="inherit"', 'color="#1b2026"')
    return f'{opening}><rect width="100%" height="100%" fill="#ffffff"/>{rest}\n'
