"""Rounds at servers that end with a quorum: how workers' rounds fall together is drawn, as no closed form says it."""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple, final

from paceline.planner.computing import Computing
from paceline.planner.draws import Draws
from paceline.planner.servers import ServerExchange
from paceline.planner.setting import Setting
from paceline.strategies.traits import Served

_SETTLING = 0.2  # of the rounds: all workers begin at once, and have yet to come apart
_SHARED = 1.01  # a link that is busier with both ways than with either is one that both pass


class Round(NamedTuple):
    end_s: float
    """When its update is made."""
    num_joined: int


class Means(NamedTuple):
    """Between rounds, after the first ones."""

    round_s: float
    num_joined: float


@final
class QuorumRounds:
    """Workers that each push, wait for the update that their change is part of, and go on.

    A link to the servers passes one push after the other, and one back all answers of a round together, chunk by chunk
    in turns. No answer leaves before a whole round has come.
    """

    def __init__(self, traffic: Served, setting: Setting, exchange: ServerExchange, draws: Draws) -> None:
        assert traffic.quorum is not None
        self._quorum, self._grace_s, self._every = traffic.quorum, traffic.grace_s, traffic.every
        self._size, self._exchange, self._computing = setting.num_workers, exchange, Computing(setting, draws)
        self._own_push_s: list[float] = exchange.own_push_s.tolist()
        self._own_pull_s: list[float] = exchange.own_pull_s.tolist()
        self._way_s: list[float] = (exchange.latency_s / 2).tolist()
        is_shared = exchange.both_s > _SHARED * max(exchange.push_s, exchange.pull_s)
        self._back = 0 if is_shared else 1
        self._free_s = [0.0, 0.0]  # when the links to the servers, and those back, are through
        self._served_s = 0.0  # when the servers are
        self._come: list[tuple[float, int]] = []
        self._held: list[int] = []
        self._closes_s = math.inf

    def means(self, num_rounds: int) -> Means:
        rounds = []
        for each in self._rounds():
            rounds.append(each)
            if len(rounds) == num_rounds:
                break
        first = int(num_rounds * _SETTLING)
        counted = rounds[first + 1 :]
        return Means(
            (rounds[-1].end_s - rounds[first].end_s) / len(counted),
            sum(each.num_joined for each in counted) / len(counted),
        )

    def _rounds(self) -> Iterator[Round]:
        for worker in range(self._size):
            self._compute(worker, 0.0)
        while True:
            come_s = self._come[0][0] if self._come else math.inf
            computed_s = self._computing.next_s
            if self._closes_s <= min(come_s, computed_s):
                yield self._close(self._closes_s)
            elif come_s <= computed_s:
                _, worker = heapq.heappop(self._come)
                self._held.append(worker)
                if len(self._held) == self._size or (len(self._held) == self._quorum and not self._grace_s):
                    yield self._close(come_s)
                elif len(self._held) == self._quorum:
                    self._closes_s = come_s + self._grace_s
            else:
                computed = self._computing.go_on()
                if computed is not None:
                    self._push(computed.worker, computed_s)

    def _compute(self, worker: int, now_s: float) -> None:
        self._computing.begin(worker, now_s + self._exchange.ask_s, num_steps=self._every)

    def _push(self, worker: int, now_s: float) -> None:
        each_s = self._exchange.push_s / self._size
        self._free_s[0] = max(self._free_s[0], now_s) + each_s
        linked_s = max(self._free_s[0], now_s + self._own_push_s[worker]) + self._way_s[worker]
        self._served_s = max(self._served_s, linked_s) + self._exchange.request_s
        heapq.heappush(self._come, (self._served_s, worker))

    def _close(self, now_s: float) -> Round:
        held, self._held, self._closes_s = self._held, [], math.inf
        self._served_s = max(self._served_s, now_s) + self._exchange.update_s
        begin_s = max(self._free_s[self._back], self._served_s)
        end_s = begin_s + len(held) * self._exchange.pull_s / self._size
        self._free_s[self._back] = end_s
        for place, worker in enumerate(held):
            turned_s = end_s - (len(held) - 1 - place) * self._exchange.turn_s
            got_s = max(turned_s, self._served_s + self._own_pull_s[worker])
            self._compute(worker, got_s + self._way_s[worker])
        return Round(self._served_s, len(held))
