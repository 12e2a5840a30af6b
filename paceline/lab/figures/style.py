"""How strategies and worker counts are told apart: by colour, and without it by dash, marker and pattern.

Colours are names of CSS variables, which the page resolves when it draws: one figure serves light, dark and print.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass

INK, FAINT, GRID = "var(--ink)", "var(--faint)", "var(--grid)"
NUM_COLOURS = 8

_DASHES = (
    "solid",
    "8px 4px",
    "2px 3px",
    "9px 3px 2px 3px",
    "14px 4px",
    "5px 2px",
    "9px 3px 2px 3px 2px 3px",
    "1px 5px",
)
_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
_PATTERNS = ("", "/", "x", "-", "\\", ".", "|", "+")


@dataclass(frozen=True)
class Style:
    colour: str
    dash: str
    marker: str
    pattern: str


def strategy_styles(strategies: Sequence[str]) -> dict[str, Style]:
    """A style for each strategy, told apart by any one of its parts where there are at most eight."""
    return {
        name: Style(_colour("series", index % NUM_COLOURS), **_shapes(index))
        for index, name in enumerate(dict.fromkeys(strategies))
    }


def worker_styles(counts: Sequence[int]) -> dict[int, Style]:
    """A style for each number of workers; colours run from light to strong as the count grows."""
    ordered = sorted(set(counts))
    last = max(len(ordered) - 1, 1)
    steps = [round(index * (NUM_COLOURS - 1) / last) for index in range(len(ordered))]
    return {
        count: Style(_colour("ramp", step), **_shapes(index))
        for index, (count, step) in enumerate(zip(ordered, steps, strict=True))
    }


def _colour(palette: str, index: int) -> str:
    return f"var(--{palette}-{index + 1})"


def _shapes(index: int) -> dict[str, str]:
    """Beyond eight the dashes shift against the markers, so that pairs stay distinct up to 64."""
    turn, place = divmod(index, NUM_COLOURS)
    return {
        "dash": _DASHES[(place + turn) % len(_DASHES)],
        "marker": _MARKERS[place] + ("-open" if turn % 2 else ""),
        "pattern": _PATTERNS[(place + turn) % len(_PATTERNS)],
    }


def plain(text: object) -> str:
    """Text as plotly is to show it: its labels understand a little HTML, and names are not to be markup."""
    return html.escape(str(text), quote=False)
