"""Which hosts may have workers: those that were found, but for those whose workers have failed."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from paceline.errors import UsageError

_COOLDOWN_LIMITS_S = (1.0, 3600.0)


@final
@dataclass(frozen=True)
class Cooldown:
    """How long a host gets no workers after one of its has failed: the second time twice as long, and so on.

    Raises UsageError for a range that is empty, or reaches outside of a second and an hour.
    """

    least_s: float
    most_s: float

    def __post_init__(self) -> None:
        shortest_s, longest_s = _COOLDOWN_LIMITS_S
        if not shortest_s <= self.least_s <= self.most_s <= longest_s:
            raise UsageError(
                f"a cooldown range is two numbers of seconds between {shortest_s:g} and {longest_s:g}, the smaller "
                f"one first, not {self.least_s:g} and {self.most_s:g}"
            )

    def after(self, num_failures: int, chance: float) -> float:
        """Seconds after so many failures of a host; by chance (0 to 1) somewhat longer, lest all come back at once."""
        return min(self.most_s, self.least_s * (2.0**num_failures + chance))


@dataclass
class _Host:
    slots: int = 0
    num_failures: int = 0
    is_out: bool = False
    until_s: float | None = None
    """When it may have workers again; none: never."""


@final
@dataclass
class KnownHosts:
    """Oldest first, so that the first rank is on a host that has the state.

    Args:
        cooldown: none: a host whose worker has failed gets no other.
        draw: a number from 0 to 1.
    """

    cooldown: Cooldown | None = None
    draw: Callable[[], float] = random.random
    _hosts: dict[str, _Host] = field(default_factory=dict, init=False)

    def find(self, slots: Mapping[str, int]) -> None:
        """These are there now, and no others. What is known of hosts that are gone for a while is kept."""
        for name, host in self._hosts.items():
            host.slots = slots.get(name, 0) if host.slots else 0
        for name, count in slots.items():
            if not (name in self._hosts and self._hosts[name].slots):  # new, or back again: behind all others
                self._hosts[name] = self._hosts.pop(name, _Host())
            self._hosts[name].slots = count

    def fail(self, name: str, now_s: float) -> None:
        """A worker there has failed."""
        host = self._hosts[name]
        if host.is_out:
            return
        host.is_out, host.num_failures = True, host.num_failures + 1
        if self.cooldown is not None:
            host.until_s = now_s + self.cooldown.after(host.num_failures, self.draw())

    def revive(self, now_s: float) -> None:
        """Hosts whose cooldown is over may have workers again, behind all others."""
        for name in [name for name, host in self._hosts.items() if host.until_s is not None and host.until_s <= now_s]:
            self._hosts[name] = host = self._hosts.pop(name)
            host.is_out, host.until_s = False, None

    def is_out(self, name: str) -> bool:
        """Whether a worker there has failed, and no other may be there yet."""
        return self._hosts[name].is_out

    @property
    def usable(self) -> dict[str, int]:
        """Slots by host."""
        return {name: host.slots for name, host in self._hosts.items() if host.slots and not host.is_out}

    @property
    def next_s(self) -> float | None:
        """When the next cooldown ends."""
        return min((host.until_s for host in self._hosts.values() if host.until_s is not None), default=None)
