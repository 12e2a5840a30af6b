"""Line and scatter charts as SVG text: all that the pages of docs/ need, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 50, 60
# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333", "#999999")
_MARKER_RADIUS = 4
_LINE_PX = 18
_MOST_TICKS = 12


@dataclass(frozen=True)
class Series:
    """One line; `limits`, where given, is drawn dashed in its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    limits: Sequence[tuple[float, float]] = ()


def line_chart(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """The chart as an SVG document, both axes from zero; every x has a tick, where these are few."""
    every = [point for one in series for point in (*one.points, *one.limits)]
    x_ticks = sorted({x for x, _ in every})
    if len(x_ticks) > _MOST_TICKS:
        step = _nice_step(x_ticks[-1])
        x_ticks = [number * step for number in range(math.ceil(x_ticks[-1] / step) + 1)]
    y_step = _nice_step(max(y for _, y in every))
    y_top = y_step * math.ceil(max(y for _, y in every) / y_step)
    x_top = max(x_ticks) * 1.05

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + point[0] / x_top * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - point[1] / y_top * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    parts = _frame(title)
    for number in range(round(y_top / y_step) + 1):
        x, y = place((0, number * y_step))
        parts.append(f'<path d="M{x} {y} H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(x - 8, y + 4, f"{number * y_step:g}", anchor="end"))
    for tick in x_ticks:
        x, y = place((tick, 0))
        parts.append(_text(x, y + 20, f"{tick:g}"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 18, x_label))
    parts.append(_text(20, (_TOP + _HEIGHT - _BOTTOM) / 2, y_label, turned=True))
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(_polyline([place(point) for point in one.limits], colour, dashed=True))
        parts.append(_polyline([place(point) for point in one.points], colour, dashed=False))
        parts += [
            f'<circle cx="{x}" cy="{y}" r="{_MARKER_RADIUS}" fill="{colour}"/>' for x, y in map(place, one.points)
        ]
        y = _TOP + number * _LINE_PX
        parts.append(_polyline([(_WIDTH - _RIGHT + 12, y), (_WIDTH - _RIGHT + 34, y)], colour, dashed=False))
        parts.append(_text(_WIDTH - _RIGHT + 40, y + 4, one.name, anchor="start"))
    if any(one.limits for one in series):
        y = _TOP + len(series) * _LINE_PX
        parts.append(_polyline([(_WIDTH - _RIGHT + 12, y), (_WIDTH - _RIGHT + 34, y)], "#333333", dashed=True))
        parts.append(_text(_WIDTH - _RIGHT + 40, y + 4, "limit of the links", anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def decay_chart(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """Lines against a logarithmic axis, as an SVG document; points that are not above 0 are left out."""
    drawn = [Series(one.name, [point for point in one.points if point[1] > 0]) for one in series]
    every = [point for one in drawn for point in one.points]
    low, high = (edge(math.log10(each(y for _, y in every))) for edge, each in ((math.floor, min), (math.ceil, max)))
    right = max(x for x, _ in every)
    x_step = _nice_step(right)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + point[0] / right * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - math.log10(point[1])) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    parts = _frame(title)
    for power in range(low, high + 1):
        x, y = place((0, 10.0**power))
        parts.append(f'<path d="M{x} {y} H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(x - 8, y + 4, f"{10.0**power:g}", anchor="end"))
    for number in range(math.floor(right / x_step) + 1):
        x, y = place((number * x_step, 10.0**low))
        parts.append(_text(x, y + 20, f"{number * x_step:g}"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 18, x_label))
    parts.append(_text(20, (_TOP + _HEIGHT - _BOTTOM) / 2, y_label, turned=True))
    for number, one in enumerate(drawn):
        colour, y = _COLOURS[number % len(_COLOURS)], _TOP + number * _LINE_PX
        parts.append(_polyline([place(point) for point in one.points], colour, dashed=False))
        parts.append(_polyline([(_WIDTH - _RIGHT + 12, y), (_WIDTH - _RIGHT + 34, y)], colour, dashed=False))
        parts.append(_text(_WIDTH - _RIGHT + 40, y + 4, one.name, anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def scatter_chart(series: Sequence[Series], *, title: str, x_label: str, y_label: str, tolerance: float) -> str:
    """Points on two logarithmic axes of the same range, with the line where both are equal.

    Args:
        tolerance: dashed lines show where y is so much above and below x, as a fraction of it.
    """
    values = [value for one in series for point in one.points for value in point]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    side = _HEIGHT - _TOP - _BOTTOM

    def along(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * side

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return round(_LEFT + along(point[0]), 1), round(_HEIGHT - _BOTTOM - along(point[1]), 1)

    parts = _frame(title)
    for power in range(low, high + 1):
        x, y = place((10.0**power, 10.0**power))
        parts.append(f'<path d="M{_LEFT} {y} H{_LEFT + side} M{x} {_TOP} V{_HEIGHT - _BOTTOM}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end"))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 20, f"{10.0**power:g}"))
    parts.append(_text(_LEFT + side / 2, _HEIGHT - 18, x_label))
    parts.append(_text(20, (_TOP + _HEIGHT - _BOTTOM) / 2, y_label, turned=True))
    ends = (10.0**low, 10.0**high)
    for factor in (1 - tolerance, 1.0, 1 + tolerance):
        first, last = max(ends[0], ends[0] / factor), min(ends[1], ends[1] / factor)
        line = [place((x, x * factor)) for x in (first, last)]
        parts.append(_polyline(line, "#888888", dashed=factor != 1.0))
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        parts += [
            f'<circle cx="{x}" cy="{y}" r="{_MARKER_RADIUS}" fill="{colour}" fill-opacity="0.7"/>'
            for x, y in map(place, one.points)
        ]
        y = _TOP + number * _LINE_PX
        parts.append(f'<circle cx="{_LEFT + side + 24}" cy="{y}" r="{_MARKER_RADIUS}" fill="{colour}"/>')
        parts.append(_text(_LEFT + side + 40, y + 4, one.name, anchor="start"))
    y = _TOP + len(series) * _LINE_PX
    parts.append(_polyline([(_LEFT + side + 12, y), (_LEFT + side + 34, y)], "#888888", dashed=True))
    parts.append(_text(_LEFT + side + 40, y + 4, f"{tolerance:.0%} above and below", anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str) -> list[str]:
    """The beginning of every chart."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 28, title, anchor="start", weight="700"),
    ]


def _nice_step(top: float) -> float:
    """Between 4 and 10 steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(top / 4))
    return next(factor * power for factor in (5, 2, 1) if factor * power * 4 <= top)


def _polyline(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "400", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x} {y})"' if turned else ""
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="#222222"{turn}'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
