"""When simulated hosts fail, are taken away, and are there again."""

import math
import random
from collections.abc import Callable, Iterable
from typing import final

from paceline.cluster.description import Cluster
from paceline.engines.virtual.events import EventQueue
from paceline.seeding import derive


@final
class Lives:
    """Draws each host's fate from generators of its own, made from the run's seed, and tells of it in virtual time.

    Args:
        on_notice: a host will be taken away so many seconds later.
        on_gone: a host has failed or was taken away.
        on_back: it, or one like it, is there again.
    """

    def __init__(
        self,
        cluster: Cluster,
        timeline: EventQueue,
        *,
        seed: int,
        on_notice: Callable[[int, float], None],
        on_gone: Callable[[int], None],
        on_back: Callable[[int], None],
    ) -> None:
        self._hosts, self._timeline, self._seed = cluster.each_host(), timeline, seed
        self._failures_per_s = cluster.compute.failures_per_hour / 3600
        self._on_notice, self._on_gone, self._on_back = on_notice, on_gone, on_back
        self._draws: dict[tuple[str, int], random.Random] = {}

    def begin(self, hosts: Iterable[int]) -> None:
        """These hosts are there."""
        for host in hosts:
            self._live(host)

    def _live(self, host: int) -> None:
        now_s, kind = self._timeline.now_s, self._hosts[host]
        fails_s = now_s + self._draw("failure", host, self._failures_per_s)
        noticed_s = now_s + self._draw("preemption", host, kind.preemptions_per_hour / 3600)
        gone_s = min(fails_s, noticed_s + kind.notice_s)
        if noticed_s < gone_s:
            self._timeline.meanwhile(noticed_s, self._on_notice, host, kind.notice_s)
        if gone_s < math.inf:
            self._timeline.meanwhile(gone_s, self._go, host)

    def _go(self, host: int) -> None:
        back_after_s = self._hosts[host].back_after_s
        if back_after_s is not None:
            self._timeline.meanwhile(self._timeline.now_s + back_after_s, self._return, host)
        self._on_gone(host)

    def _return(self, host: int) -> None:
        self._live(host)
        self._on_back(host)

    def _draw(self, what: str, host: int, per_s: float) -> float:
        """Seconds until it happens to the host."""
        if not per_s:
            return math.inf
        if (what, host) not in self._draws:
            self._draws[what, host] = random.Random(derive(self._seed, what, host))
        return self._draws[what, host].expovariate(per_s)
