"""Logarithmic axes that are read at first sight: round numbers, written out."""

import math
from collections.abc import Iterable
from typing import Any

_MIN_TICKS = 4
_ROOM = 0.08  # decades around the points
_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8))  # within a decade, the coarsest that give enough ticks


def span_of(values: Iterable[float]) -> list[float]:
    """The exponents of ten between which positive numbers lie, with room around them for marks and labels."""
    numbers = list(values)
    return [math.log10(min(numbers)) - _ROOM, math.log10(max(numbers)) + 1.5 * _ROOM]


def axis(span: list[float]) -> dict[str, Any]:
    """Plotly's settings of an axis over such a span."""
    decades = range(math.floor(span[0]), math.ceil(span[1]) + 1)
    for steps in _STEPS:
        values = [step * 10.0**decade for decade in decades for step in steps]
        values = [value for value in values if span[0] <= math.log10(value) <= span[1]]
        if len(values) >= _MIN_TICKS:
            break
    return {
        "type": "log",
        "range": span,
        "tickmode": "array",
        "tickvals": values,
        "ticktext": [f"{value:,.4g}" if value < 1e4 else f"{value / 1e3:,g}k" for value in values],
    }
