"""Workers that make no step while others, done with theirs, wait for them without a deadline of their own."""

from typing import final


@final
class Standstill:
    """Knows since when each worker stands still. `now_s` is any clock that does not go back."""

    def __init__(self) -> None:
        self._num_steps: dict[str, int] = {}
        self._since_s: dict[str, float] = {}
        self._awaiting_since_s: dict[str, float] = {}

    def hear(self, name: str, *, num_steps: int, awaits_others: bool, now_s: float) -> None:
        """What a worker says of itself, every now and then."""
        if self._num_steps.get(name) != num_steps:
            self._num_steps[name], self._since_s[name] = num_steps, now_s
        if not awaits_others:
            self._awaiting_since_s.pop(name, None)
        else:
            self._awaiting_since_s.setdefault(name, now_s)

    def still_for(self, name: str, *, now_s: float) -> float:
        """Seconds in which this worker has made no step, and another one has waited for it; 0 if it waits itself."""
        if not self._awaiting_since_s or name in self._awaiting_since_s:
            return 0.0
        return now_s - max(self._since_s.get(name, now_s), min(self._awaiting_since_s.values()))
