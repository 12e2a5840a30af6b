"""The launcher's half of an elastic run: it notices who is gone or silent, hears who joins or leaves, and has
the others go on."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, final

from paceline.elastic import Coordinator, Elastic, Form, Report, StaleEpoch
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.lane_desk import LaneDesk
from paceline.engines.ray.letting_go import LettingGo
from paceline.engines.ray.liveness import MemoryKills
from paceline.engines.ray.reforming import report_of
from paceline.engines.silence import Silence
from paceline.errors import RunFailed
from paceline.membership import Membership
from paceline.messages import Kind

_LEASE_DEADLINES = 3
"""A lease is so many deadlines long, so that a launcher that stands still for a moment loses nobody. Nothing hangs on
its end: without the others' parts a worker applies no step meanwhile."""
_FIRST_WORD_S = 60.0
"""How long to wait for a process's first word: before it the process loads what it is to run."""


@final
class Survival:
    """Raises RunFailed where too few workers are left.

    Args:
        deadline_s: how long the others may wait for one who does not come to its next exchange.
        pids: the workers' processes, by name.
        elsewhere: those on other hosts.
        desk: where workers that take their own steps ask for data.
        letting_go: has servers, and what is asked there, go on without whoever is gone, or with who comes, where
            servers outlive workers.
        servers: those that others can take over from, by name, and so are ended when they are silent.
        say: shows a line where the run was started.
        clock: one that does not go back, the controller's.
    """

    def __init__(
        self,
        elastic: Elastic,
        controller: Controller,
        *,
        membership: Membership,
        deadline_s: float,
        pids: Mapping[str, int],
        elsewhere: Set[str],
        desk: LaneDesk | None = None,
        letting_go: LettingGo | None = None,
        servers: Callable[[], Iterable[str]] = tuple,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._desk, self._letting_go, self._servers = desk, letting_go, servers
        self._elastic, self._controller, self._pids, self._say = elastic, controller, dict(pids), say
        self._elsewhere = set(elsewhere)
        self._coming: set[str] = set()  # started, and not ready yet
        self._memory = MemoryKills()
        self._coordinator = Coordinator.first(membership, at_least=elastic.at_least)
        self._sites: dict[str, Any] = {}
        self._seeking: set[int] = set()  # joiners that have asked for a state, and have none yet
        self._states: dict[int, Any] = {}  # for joiners, of the present epoch
        self._gave: set[int] = set()  # in the present epoch
        self._leaving: set[int] = set()  # have been asked to
        self._waiting: set[int] = set()  # have taken a state, and wait to meet the others
        self.left: set[str] = set()
        """The workers that have been asked to leave, and have."""
        self._is_ending = False  # a worker has come to the end of its script
        self._why: dict[str, str] = {}
        self._deadline_s, self._awaited_s = deadline_s, 0.0
        self._since_s: float | None = None  # when the first word of a change has come
        self._silence = Silence(now_s=clock(), deadline_s=elastic.deadline_s)

    @property
    def has_begun(self) -> bool:
        """Whether all workers have come to their first step, as far as is known here."""
        return self._controller.progress.phase == "training" or bool(self._controller.words or self._sites)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self._coordinator.living

    @property
    def staying(self) -> tuple[int, ...]:
        """The living workers that have not been asked to leave."""
        return tuple(rank for rank in self._coordinator.living if rank not in self._leaving)

    def pid(self, name: str) -> int | None:
        return self._pids.get(name)

    def add(self, name: str, pid: int, *, is_here: bool) -> None:
        """A process that is to join, on this host or another."""
        self._pids[name] = pid
        self._coming.add(name)
        if not is_here:
            self._elsewhere.add(name)

    def add_server(self, name: str, pid: int, *, is_here: bool) -> None:
        """A server that has come, on this host or another."""
        self._pids[name] = pid
        if not is_here:
            self._elsewhere.add(name)

    def retire(self, rank: int) -> None:
        """Ask it to leave between two steps."""
        self._leaving.add(rank)
        self._controller.tell(f"worker-{rank}", Kind.RETIRE)

    def lose(self, name: str) -> None:
        """This worker's process has ended, in the middle of the run."""
        rank, progress = rank_of(name), self._controller.progress
        progress.phase = "training"  # whoever would have said so may be the one
        why = self.why(name)
        self._since_s = self._clock()
        epoch = self._coordinator.membership.epoch
        self._coordinator, form = self._coordinator.died(rank)
        self._tell_lost(self._coordinator.living, epoch=epoch)
        left = len(self._coordinator.living)
        num_steps = self._controller.num_steps.get(name, 0)
        self._controller.event("lost", name, process=self._pids.get(name), why=why, num_steps=num_steps, left=left)
        self._say(f"worker {rank} (process {self._pids.get(name)}) is lost: {why}; workers left: {left}")
        self._go_on_without(rank)
        self._send(form)

    def _go_on_without(self, rank: int) -> None:
        """What it has given cannot be had of it any more."""
        self._states = {to: state for to, state in self._states.items() if state["giver"] != rank}
        self._gave.discard(rank)
        if self._letting_go is not None:
            self._letting_go.let_go(rank)
            self._ask_for_state()

    def why(self, name: str) -> str:
        """Say what ended its process, as far as the launcher knows."""
        return self._why.pop(name, None) or f"its process ended{self._memory.told_since()}"

    def end(self, name: str) -> None:
        """This worker has come to its end, or does not join."""
        self._coming.discard(name)
        self._is_ending = self._is_ending or rank_of(name) in self._coordinator.living
        self._take_out(rank_of(name), self._coordinator.ended)

    def _take_out(self, rank: int, how: Callable[[int], tuple[Coordinator, Form | None]]) -> None:
        self._coordinator, form = how(rank)
        self._waiting.discard(rank)
        self._send(form)

    def hear(self) -> None:
        """Take in what workers have said of themselves, and of losses that they see."""
        while self._controller.words:
            kind, body = self._controller.words.popleft()
            if kind is Kind.REPORT:
                self._hear_report(body)
            elif kind is Kind.TAKE:
                self._hear_newcomer(body["rank"], epoch=body["epoch"])
            elif kind is Kind.RESULT:
                self._hand_on_result(body)
            elif kind is Kind.LANE and self._desk is not None:
                self._desk.hear(body)
            elif kind is Kind.GIFT:
                self._hear_gift(body)
            elif kind is Kind.ENDS:
                self._why[f"worker-{body['rank']}"] = body["why"]
                self._kill(f"worker-{body['rank']}")
            elif kind is Kind.RETIRED:
                self._hear_leaving(body["rank"])
        self._hand_on_states()

    def _hear_leaving(self, rank: int) -> None:
        """A worker leaves, as it was asked to. Others may have died since it was asked: raises RunFailed where too few
        stay, unless some have come to the end of their script already."""
        name, left = f"worker-{rank}", len(self._coordinator.living) - 1
        self._controller.event("left", name, left=left)
        self._say(f"worker {rank} leaves; workers left: {left}")
        self._since_s = self._clock()
        self.left.add(name)
        self._go_on_without(rank)
        epoch = self._coordinator.membership.epoch
        self._take_out(rank, self._coordinator.ended if self._is_ending else self._coordinator.died)
        if self._desk is not None and self._letting_go is None:  # who has a mailbox does not see it leave
            self._tell_lost(self._coordinator.living, epoch=epoch)

    def _hear_gift(self, body: Mapping[str, Any]) -> None:
        """Where workers take their own steps, a joiner goes on as the one in the furthest epoch of the data."""
        self._gave.add(body["rank"])
        for rank in body["to"]:
            before = self._states.get(rank)
            if before is None or self._epoch_of(body["rank"]) >= self._epoch_of(before["giver"]):
                self._states[rank] = body["state"]

    def _epoch_of(self, rank: int) -> int:
        """Of the data, which it is in; with a lane, which it has begun: there it may be through with the last."""
        own = self._controller.epochs.get(f"worker-{rank}", 0)
        return own if self._desk is None else self._desk.book.epochs.get(rank, own)

    def _let_in(self, report: Report, letting_go: LettingGo) -> None:
        """Under servers a joiner that has a state takes part at once. The others have it meet them in the next pause,
        since who has given a state meets nobody before all have said that they stop."""
        rank, name = report.rank, f"worker-{report.rank}"
        try:
            self._coordinator = self._coordinator.entered(report)
        except StaleEpoch as stale:
            self._controller.event("refused", name, error=str(stale))
            self._controller.tell(name, Kind.FORM, again=True)
            return
        letting_go.let_in(rank)
        self._states.pop(rank, None)
        self._waiting.add(rank)
        living = self._coordinator.living
        self._controller.tell(name, Kind.FORM, epoch=report.epoch, ranks=sorted(living))
        self._say(f"worker {rank}: joined; workers: {len(living)}")
        self._ask_for_state()  # for others that join, of this one too

    def _hear_report(self, body: Mapping[str, Any]) -> None:
        rank = body["rank"]
        if self._letting_go is not None and rank in self._coordinator.joining:
            self._let_in(report_of(body), self._letting_go)
            return
        if rank in self._coordinator.joining:
            self._waiting.add(rank)
        self._since_s = self._since_s or self._clock()
        try:
            self._coordinator, form = self._coordinator.hear(report_of(body))
        except StaleEpoch as stale:
            self._controller.event("refused", f"worker-{rank}", error=str(stale))
            self._tell_to_ask_again(rank)
            return
        self._sites[str(rank)] = body["site"]
        self._tell_lost(self._coordinator.awaited, epoch=body["epoch"])
        self._send(form)

    def _tell_lost(self, ranks: Iterable[int], *, epoch: int) -> None:
        """Not all of this epoch take part in it any more: end the waits of these."""
        gone = sorted({*self._coordinator.membership.ranks} - {*self._coordinator.living})
        for rank in ranks:
            self._controller.tell(f"worker-{rank}", Kind.LOST, epoch=epoch, gone=gone)

    def _hear_newcomer(self, rank: int, *, epoch: int) -> None:
        """Its script has come to this epoch of the data, and goes on to that of the others before it takes a state."""
        others = max(map(self._epoch_of, self.ranks), default=0)
        if epoch < others:
            self._controller.tell(f"worker-{rank}", Kind.STATE, epoch=others)
        elif rank not in self.ranks:
            if rank not in self._coordinator.joining:
                self._controller.event("ready", f"worker-{rank}")
                self._coming.discard(f"worker-{rank}")
            self._coordinator = self._coordinator.joined(rank)
            self._seeking.add(rank)
            if rank not in self._states:
                self._ask_for_state()

    def _hand_on_states(self) -> None:
        """Under servers when all have given back what is left of their lanes, so that a joiner finds what to do."""
        yet_to_give = {*self.ranks} - self._gave
        if self._letting_go is not None and self._desk is not None and not self._desk.book.have_given_back(yet_to_give):
            return
        for rank in self._seeking & self._states.keys():
            self._seeking.discard(rank)
            self._controller.tell(f"worker-{rank}", Kind.STATE, state=self._states[rank])

    def _ask_for_state(self) -> None:
        coordinator = self._coordinator
        if coordinator.giver is None:
            return
        # Under servers nobody knows who comes to another batch, and each has a lane.
        givers = (coordinator.giver,) if self._letting_go is None else coordinator.living
        is_far = any(f"worker-{rank}" in self._elsewhere for rank in (*givers, *coordinator.joining))
        for rank in givers:
            self._controller.tell(f"worker-{rank}", Kind.GIVE, ranks=list(coordinator.joining), is_far=is_far)

    def _tell_to_ask_again(self, rank: int) -> None:
        if rank in self._waiting:
            self._waiting.discard(rank)
            self._controller.tell(f"worker-{rank}", Kind.FORM, again=True)

    def end_silent(self) -> None:
        """End the processes of members that have said nothing for the deadline, so that they are known to be gone.
        Those on other hosts have leases, and end by themselves if they are cut off."""
        if not self.has_begun:
            return
        self._silence.look(now_s=self._clock(), has_heard_all=self._controller.has_heard_all)
        watched = [f"worker-{rank}" for rank in (*self._coordinator.living, *self._coordinator.awaited)]
        deadline_s = self._elastic.deadline_s
        joining = {*self._coming, *(f"worker-{rank}" for rank in self._coordinator.joining)} - {*watched}
        lease_s = _LEASE_DEADLINES * deadline_s
        watched += self._servers()
        lent = {*watched, *joining}
        self._controller.leases = {name: lease_s if name in lent else None for name in self._elsewhere}
        for name in [*watched, *sorted(joining & self._elsewhere)]:
            if name in self._controller.gone:  # it has said goodbye, and is about to end
                continue
            silent_s = self._silence.of(name, heard_s=self._controller.heard_s.get(name))
            # Nobody waits for who starts, which may take all of its host: only where it is cut off, it is given up.
            limit_s = lease_s if name in joining else deadline_s
            if name not in self._controller.heard_s:
                limit_s = max(limit_s, _FIRST_WORD_S)
            if silent_s > limit_s and name not in self._why:
                self._why[name] = f"it was silent for {silent_s:.1f} s and was ended"
                self._kill(name)

    def require_all(self) -> None:
        """Raises RunFailed, which names them, if others have waited for workers too long that live and do not come."""
        awaited = self._coordinator.awaited
        if not awaited:
            self._awaited_s = 0.0
            return
        self._awaited_s = self._awaited_s or self._clock()
        if self._clock() - self._awaited_s > self._deadline_s:
            joiners = [rank for rank in awaited if rank not in self._coordinator.living]
            if joiners:
                for rank in joiners:
                    self._kill(f"worker-{rank}")
                return
            names = ", ".join(f"worker {rank} (process {self._pids[f'worker-{rank}']})" for rank in awaited)
            raise RunFailed(
                f"{names}: not come to the next exchange for {self._deadline_s:g} s, while the others wait to go on "
                "without those who have died; see what keeps it, or give a longer --deadline"
            )

    def _kill(self, name: str) -> None:
        """Kill a worker. On another host, which may not be reached any more, it is expelled: without word from here it
        applies no further step."""
        if name in self._elsewhere:
            self._controller.expelled.add(name)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[name], signal.SIGKILL)

    def _hand_on_result(self, body: Mapping[str, Any]) -> None:
        self._coordinator, told = self._coordinator.handed_on(epoch=body["epoch"], step=body["step"])
        for rank in told:
            self._controller.pass_on(f"worker-{rank}", Kind.FORM, body["payload"], result=body["step"])

    def _send(self, form: Form | None) -> None:
        if self._coordinator.ahead is not None:
            self._controller.tell(f"worker-{self._coordinator.ahead}", Kind.FORM, hand=True)
        if form is None:
            return
        ranks = form.membership.ranks
        took_s = self._clock() - (self._since_s or self._clock())
        self._since_s = None
        joined = [rank for rank in ranks if rank in self._waiting]
        self._controller.event(
            "reformed", epoch=form.membership.epoch, ranks=list(ranks), step=form.step, took_s=took_s, joined=joined
        )
        if joined and self._letting_go is None:
            self._say(f"{', '.join(f'worker {rank}' for rank in joined)}: joined; workers: {len(ranks)}")
        # Under servers workers have no step in common.
        what = f"on from step {form.step + 1}" if self._letting_go is None else "on together"
        self._say(f"{', '.join(f'worker {rank}' for rank in ranks)}: {what}, {took_s:.2f} s later")
        body = {
            "epoch": form.membership.epoch,
            "ranks": list(ranks),
            "step": form.step,
            "met": form.met,
            "sites": {str(rank): self._sites[str(rank)] for rank in ranks},
        }
        for rank in ranks:
            if self._desk is not None and self._letting_go is None:
                self._desk.book.come(rank)
            self._controller.tell(f"worker-{rank}", Kind.FORM, **body)
        self._waiting -= set(joined)
        self._states.clear()
        self._gave.clear()
        for rank in list(self._waiting):
            self._tell_to_ask_again(rank)
        self._ask_for_state()


def rank_of(name: str) -> int:
    return int(name.partition("-")[2])
