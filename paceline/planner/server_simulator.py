"""Workers and one server that stands for all of them, event by event, with the servers' own admission rule."""

import math
from typing import final

import numpy as np

from paceline.membership import Membership
from paceline.planner.computing import Computing
from paceline.planner.draws import Draws
from paceline.planner.servers import ServerExchange, server_exchange
from paceline.planner.setting import Setting
from paceline.planner.shared_queue import TINY, SharedQueue
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.strategies.traits import Served

_MOST_PASSING = 1 / 4  # fitted to the virtual engine's messages, where gradients are a few chunks each


@final
class SynchronousRun:
    """The gradient that completes a clock has all workers answered whose gradients counted, in turns."""

    def __init__(self, traffic: Served, setting: Setting, draws: Draws) -> None:
        size = setting.num_workers
        self._rule: AdmissionRule = BulkSynchronous(Membership.first(size), backup_workers=traffic.backup_workers)
        self._exchange = server_exchange(setting, num_gradients=size - traffic.backup_workers, coding=traffic)
        self._computing, self._every = Computing(setting, draws), traffic.every
        self._besides_s = self._exchange.ask_s + self._exchange.rows.in_turns_s
        self._own_push_s, self._own_pull_s = self._exchange.own_push_s.tolist(), self._exchange.own_pull_s.tolist()
        self._way_s: list[float] = (self._exchange.latency_s / 2).tolist()
        self._starts_s: list[float] = []  # of the pushes since the last clock
        self._clocks = [0] * size

    def run(self, num_clocks: int) -> list[float]:
        """When each of so many clocks was answered."""
        ends_s: list[float] = []
        for worker in range(len(self._clocks)):
            self._compute(worker, 0.0)
        while len(ends_s) < num_clocks:
            computed = self._computing.go_on()
            end_s = None if computed is None else self._push(computed.worker, computed.at_s)
            if end_s is not None:
                ends_s.append(end_s)
        return ends_s

    def _compute(self, worker: int, now_s: float) -> None:
        self._computing.begin(worker, now_s + self._besides_s, num_steps=self._every)

    def _push(self, worker: int, begin_s: float) -> float | None:
        """When the clock was answered, if this gradient completes it."""
        self._starts_s.append(begin_s)
        contributors = self._rule.push(worker, self._clocks[worker])
        if not contributors:
            if not self._rule.is_held(worker):  # too late for its clock
                self._clocks[worker] = self._rule.clock_of(worker)
                trip_s = self._own_push_s[worker] + self._own_pull_s[worker] + 2 * self._way_s[worker]
                self._compute(worker, begin_s + trip_s)
            return None
        end_s = float(self._exchange.answered_s(np.array(self._starts_s))) + self._way_s[worker]
        self._starts_s.clear()
        clock = self._rule.clock_of(worker)
        for place, other in enumerate(contributors):
            self._clocks[other] = clock
            ahead_s = (len(contributors) - 1 - place) * self._exchange.turn_s
            self._compute(other, end_s - ahead_s + self._way_s[other])
        return end_s


@final
class AsynchronousRun:
    """Each gradient is a job in two processor-sharing queues: the links to the servers, and those back. It enters the
    second when its first piece has left the first. Where both ways share a link, gradients go first and answers get
    what is left, or a little."""

    def __init__(self, traffic: Served, setting: Setting, draws: Draws) -> None:
        assert traffic.staleness is not None
        num_workers = setting.num_workers
        self._rule = StaleSynchronous(Membership.first(num_workers), staleness=traffic.staleness)
        exchange = server_exchange(setting, num_gradients=1, coding=traffic)
        self._computing, self._every, self._ask_s = Computing(setting, draws), traffic.every, exchange.ask_s
        self._piece = 1 / exchange.num_pieces
        part = self._piece if len(setting.places.servers) == 1 else _late(exchange, self._piece)
        (ahead_s, all_ahead_s), (behind_s, all_behind_s) = exchange.rows.ways
        own_s, back_s = exchange.own_push_s + ahead_s, exchange.own_pull_s + behind_s
        self._part = 1 - (1 - part) * float((exchange.own_push_s / own_s).mean())
        self._own_s: list[float] = own_s.tolist()
        self._last_back_s: list[float] = (exchange.own_pull_s * self._piece + behind_s).tolist()
        self._latency_s = (exchange.latency_s - exchange.overlap_s).tolist()
        self._served_s = exchange.served_s
        self._push_s = (exchange.push_s + all_ahead_s) / num_workers
        self._pull_s = (exchange.pull_s + all_behind_s) / num_workers
        self._chunk_share = min(1.0, exchange.chunk_share)
        self._both_push_s = exchange.shared_push_s / num_workers
        self._both_pull_s = exchange.shared_pull_s / num_workers
        self._least_push_s, self._least_pull_s = float(own_s.min()), float(back_s.min())
        self._pushing, self._pulling = SharedQueue(), SharedQueue()
        self._server_free_s = 0.0
        self._clocks = [0] * num_workers
        self._began_s = [0.0] * num_workers
        self._leaves_s = [0.0] * num_workers  # when the last piece can be answered
        self._waiting: dict[int, list[int]] = {}  # by clock, workers that were not let go on

    def run(self, num_steps: int) -> list[float]:
        """When each gradient was applied, until there are so many a worker."""
        ends_s: list[float] = []
        num_updates = num_steps * len(self._clocks)
        for worker in range(len(self._clocks)):
            self._compute(worker, 0.0)
        while len(ends_s) < num_updates:
            computed_s = self._computing.next_s
            self._pushing.pace_s = self._push_pace_s()
            self._pulling.pace_s = self._pull_pace_s()
            pushed_s, pulled_s = self._pushing.next_s, self._pulling.next_s
            now_s = min(computed_s, pushed_s, pulled_s)
            for queue in (self._pushing, self._pulling):
                queue.move_on(now_s)
            if computed_s <= min(pushed_s, pulled_s):
                computed = self._computing.go_on()
                if computed is not None:
                    self._began_s[computed.worker] = computed_s
                    self._pushing.enter(computed.worker, self._part, is_first=True)
            elif pushed_s <= pulled_s:
                worker, is_first = self._pushing.leave()
                if is_first and self._part < 1:
                    self._pushing.enter(worker, 1 - self._part, is_first=False)
                    self._pulling.enter(worker, 1.0, is_first=False)
                else:
                    self._pushed(worker, pushed_s, ends_s)
            else:
                worker, _ = self._pulling.leave()
                self._pulled(worker, pulled_s)
        return ends_s

    def _push_pace_s(self) -> float:
        """Seconds for a whole gradient, with as many as are under way."""
        count = len(self._pushing)
        share = self._passing() if self._pulling else 0.0
        return max(self._least_push_s, self._push_s * count, self._both_push_s * count / (1 - share), TINY)

    def _passing(self) -> float:
        """The part of a shared link that answers get at least: a sender's next chunk waits for all that came before it,
        so that about sqrt(2 n) chunks leave while n come."""
        num_chunks = max(1, len(self._pushing)) / self._chunk_share
        return min(_MOST_PASSING, math.sqrt(2 / num_chunks))

    def _pull_pace_s(self) -> float:
        """Seconds for a whole answer."""
        left = max(self._passing(), 1 - self._both_push_s * len(self._pushing) / self._pushing.pace_s)
        each_s = max(self._pull_s, self._both_pull_s / left)
        return max(self._least_pull_s, each_s * len(self._pulling), TINY)

    def _compute(self, worker: int, now_s: float) -> None:
        self._computing.begin(worker, now_s + self._ask_s, num_steps=self._every)

    def _pushed(self, worker: int, now_s: float, ends_s: list[float]) -> None:
        """A whole gradient has come: the server updates the last piece, and may answer."""
        began_s, own_s = self._began_s[worker], self._own_s[worker]
        last_s = self._served_s * self._piece
        begun_s = max(self._server_free_s, began_s + own_s * self._piece)
        self._server_free_s = max(begun_s + self._served_s - last_s, now_s, began_s + own_s) + last_s
        self._leaves_s[worker] = done_s = self._server_free_s
        ends_s.append(done_s)
        self._rule.push(worker, self._clocks[worker])
        self._clocks[worker] += 1
        if self._part == 1:
            self._pulling.enter(worker, 1.0, is_first=False)
        for clock in sorted(self._waiting):
            if not self._rule.is_admitted(self._waiting[clock][0]):
                break
            for freed in self._waiting.pop(clock):
                self._go_on(freed, max(now_s, self._leaves_s[freed] + self._last_back_s[freed]))

    def _pulled(self, worker: int, now_s: float) -> None:
        """The links are done with an answer; its last piece cannot come before its update."""
        end_s = max(now_s, self._leaves_s[worker] + self._last_back_s[worker])
        if self._rule.is_admitted(worker):
            self._go_on(worker, end_s)
        else:
            self._waiting.setdefault(self._clocks[worker], []).append(worker)

    def _go_on(self, worker: int, now_s: float) -> None:
        self._compute(worker, now_s + self._latency_s[worker])


def _late(exchange: ServerExchange, piece: float) -> float:
    """The part of a gradient that is pushed before its answer begins, chosen so that the answer ends when it would
    beside what the worker still packs."""
    back = exchange.own_beside * exchange.own_pull_s / np.maximum(exchange.own_push_s, TINY)
    return float(np.clip(1 - (1 - piece) * back, piece, 1.0).mean())
