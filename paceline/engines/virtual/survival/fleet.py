"""Hosts of a simulated elastic run: workers die and leave with them, and others start in their place."""

from collections import Counter
from collections.abc import Callable
from typing import final

from paceline.cluster.description import Cluster
from paceline.elastic import Elastic
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.survival.ledger import Ledger
from paceline.engines.virtual.survival.roll import Roll


@final
class Fleet:
    """All methods are called on the timeline.

    Args:
        host_of: of each worker that has been started; others are added.
        spawn: begins the program of a worker, which joins.
        kill: ends the process of a worker, if it runs, and says whether it did.
        event: writes down what happens, and `say` shows a line of it.
    """

    def __init__(
        self,
        cluster: Cluster,
        elastic: Elastic,
        timeline: EventQueue,
        roll: Roll,
        ledger: Ledger,
        *,
        host_of: dict[int, int],
        spawn: Callable[[int], None],
        kill: Callable[[int], bool],
        event: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._elastic, self._timeline = cluster, elastic, timeline
        self._roll, self._ledger, self.host_of = roll, ledger, host_of
        self._spawn, self._kill, self._event, self._say = spawn, kill, event, say
        self._hosts, self._names = cluster.each_host(), cluster.names()
        self._wanted, self._replacements_left = len(host_of), elastic.replacements
        self._coming: set[int] = set()
        self._dead: set[int] = set()
        self._away: set[int] = set()  # hosts that are gone, or will be taken away
        for rank in host_of:
            ledger.begins(rank, timeline.now_s, price_per_hour=self._price_of(rank))

    # --- what hosts do ------------------------------------------------------------------------------------------

    def notice(self, host: int, notice_s: float) -> None:
        """The host will be taken away: its workers leave between two steps."""
        self._away.add(host)
        members = self._on(host, self._roll.living)
        if members:
            self._event("notice", host=self._names[host], members=_names(members), notice_s=notice_s)
            self._say(f"{self._names[host]} will be taken away in {notice_s:g} s")
        for rank in members:
            self._roll.retire(rank)
        self.replace()

    def go(self, host: int) -> None:
        """The host is gone, and all on it are dead: the others know once it has been silent for the deadline."""
        self._away.add(host)
        self._coming -= set(self._roll.living)
        now_s = self._timeline.now_s
        for rank in self._on(host, (*self._roll.living, *self._coming)):
            if not self._kill(rank):
                continue
            self._ledger.ends(rank, now_s)
            if rank in self._coming:
                self._coming.discard(rank)
                self._event("not_joined", f"worker-{rank}", why=f"{self._names[host]} is gone")
                self._roll.end(rank)
                continue
            self._ledger.lost_steps_s += now_s - self._roll.committed_s(rank)
            self._event("lost", f"worker-{rank}", host=self._names[host], virtual_time_s=now_s)
            self._dead.add(rank)
            self._timeline.at(now_s + self._elastic.deadline_s, self._miss, rank, now_s)
        self.replace()
        if not set(self._roll.living) - self._dead:  # there is nobody to miss anybody
            for rank in self._roll.living:
                self._miss(rank, now_s)

    def come_back(self, host: int) -> None:
        """The host, or one like it, is there again."""
        self._away.discard(host)
        self.replace()

    def _miss(self, rank: int, died_s: float) -> None:
        self._roll.lose(rank, died_s=died_s)
        self._say(
            f"worker {rank} is lost with {self._names[self.host_of[rank]]}; workers left: {len(self._roll.living)}"
        )
        self.replace()

    # --- who comes ----------------------------------------------------------------------------------------------

    def replace(self) -> None:
        """Start workers for those who are gone, as many as may be, on hosts that have room."""
        self._coming -= set(self._roll.living)
        while self._replacements_left and len(self._roll.staying) + len(self._coming) < self._wanted:
            host = self._free_host()
            if host is None or not self._roll.living:
                return
            self._replacements_left -= 1
            rank = max(self.host_of) + 1
            self.host_of[rank] = host
            self._coming.add(rank)
            self._ledger.begins(rank, self._timeline.now_s, price_per_hour=self._price_of(rank), joins=True)
            self._event("starting", f"worker-{rank}", host=self._names[host])
            self._say(f"worker {rank} starts on {self._names[host]}, to join the others")
            self._timeline.at(self._timeline.now_s + self._cluster.recovery.start_s, self._start, rank)

    def end(self, rank: int) -> None:
        """The worker's program is over."""
        self._ledger.ends(rank, self._timeline.now_s)
        self._coming.discard(rank)
        self._roll.end(rank)

    def _start(self, rank: int) -> None:
        if rank in self._coming:  # its host may have gone meanwhile
            self._spawn(rank)

    def _free_host(self) -> int | None:
        taken = Counter(self.host_of[rank] for rank in {*self._roll.living, *self._coming})
        free = (host for host, kind in enumerate(self._hosts) if host not in self._away and taken[host] < kind.slots)
        return next(free, None)

    def _on(self, host: int, ranks: tuple[int, ...]) -> list[int]:
        return [rank for rank in sorted(set(ranks)) if self.host_of[rank] == host]

    def _price_of(self, rank: int) -> float:
        return self._hosts[self.host_of[rank]].worker_per_hour


def _names(ranks: list[int]) -> list[str]:
    return [f"worker-{rank}" for rank in ranks]
