"""How long members have been silent, by a listener that may pause itself."""

from typing import final

_MOST_S, _MOST_OF_DEADLINE = 1.0, 1 / 3
"""A look counts at most these seconds of the time since the one before, and at most this part of the deadline."""


@final
class Silence:
    """Silence lasts while the listener listens: of a longer pause of its own a moment counts, so that nobody is blamed
    for it. It is not forgotten either, or a listener that pauses again and again would never notice anybody.

    `now_s` and `heard_s` are of any clock that does not go back.

    Args:
        deadline_s: the shortest silence that anybody is blamed for.
    """

    def __init__(self, *, now_s: float, deadline_s: float) -> None:
        self._most_s = min(_MOST_S, deadline_s * _MOST_OF_DEADLINE)
        self._looked_s, self._listened_s = now_s, 0.0
        self._last: dict[str, tuple[float | None, float]] = {}  # when each was heard, and how long had been listened

    def look(self, *, now_s: float, has_heard_all: bool) -> None:
        """To be called often, each time when what has come is heard: the time before a look counts nothing where some
        of it is not, since it may be anybody's."""
        if has_heard_all:
            self._listened_s += min(now_s - self._looked_s, self._most_s)
        self._looked_s = now_s

    def of(self, name: str, *, heard_s: float | None) -> float:
        """Seconds of this member's silence, from the look on at which its last word was known.

        `heard_s`: when it was last heard; none: never.
        """
        if name not in self._last or self._last[name][0] != heard_s:
            self._last[name] = heard_s, self._listened_s
        return self._listened_s - self._last[name][1]
