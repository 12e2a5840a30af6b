"""How strategies and worker counts are told apart: by colour, and without it by dash, marker and pattern.

Colours are names of CSS variables, which the page resolves when it draws: one figure serves light, dark and print.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

INK, FAINT, GRID = "var(--ink)", "var(--faint)", "var(--grid)"
NUM_COLOURS = 8
_FAINTEST = 0.45

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
    opacity: float = 1.0


def strategy_styles(strategies: Sequence[str]) -> dict[str, Style]:
    """A style for each strategy, told apart by any one of its parts where there are at most eight."""
    return {
        name: Style(f"var(--series-{index % NUM_COLOURS + 1})", **_shapes(index))
        for index, name in enumerate(dict.fromkeys(strategies))
    }


def worker_styles(counts: Sequence[int], *, colour: str = INK) -> dict[int, Style]:
    """A style for each number of workers, from faint to full as the count grows; all in their strategy's colour."""
    ordered = sorted(set(counts))
    last = max(len(ordered) - 1, 1)
    return {
        count: Style(colour, **_shapes(index), opacity=_FAINTEST + (1 - _FAINTEST) * index / last)
        for index, count in enumerate(ordered)
    }


def _shapes(index: int) -> dict[str, Any]:
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
