"""How long members have been silent, by a listener that may pause itself."""

from typing import final

_MOST_S = 1.0
"""So much of the time between two looks counts."""


@final
class Silence:
    """Silence lasts while the listener listens: of a longer pause of its own a moment counts, so that nobody is blamed
    for it. It is not forgotten either, or a listener that pauses again and again would never notice anybody.

    `now_s` and `heard_s` are of any clock that does not go back.
    """

    def __init__(self, *, now_s: float) -> None:
        self._looked_s, self._listened_s = now_s, 0.0
        self._last: dict[str, tuple[float | None, float]] = {}  # when each was heard, and how long had been listened

    def look(self, *, now_s: float) -> None:
        """To be called often, each time when what has come is heard."""
        self._listened_s += min(now_s - self._looked_s, _MOST_S)
        self._looked_s = now_s

    def of(self, name: str, *, heard_s: float | None) -> float:
        """Seconds of this member's silence, from the look on at which its last word was known.

        `heard_s`: when it was last heard; none: never.
        """
        if name not in self._last or self._last[name][0] != heard_s:
            self._last[name] = heard_s, self._listened_s
        return self._listened_s - self._last[name][1]
