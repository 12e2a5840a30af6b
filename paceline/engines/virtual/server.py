"""A parameter server on a virtual host: the shards that real servers hold, asked over the simulated network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor

from paceline.comm.base import OptimizerSpec
from paceline.comm.servers.answer_window import LEAST_ANSWERS, AnswerWindow
from paceline.comm.servers.part import Part, are_in_turn, build_part
from paceline.comm.wire import FRAME_BYTES
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.links import Network
from paceline.errors import PacelineError
from paceline.layout import Layout
from paceline.records import Reporter, UpdateRecord
from paceline.server.admission import AdmissionRule
from paceline.server.ranges import KeyRange, in_shards
from paceline.server.shard import Answer, Groups
from paceline.server.state import export_state, import_state

NOTICE_BYTES = 256.0
"""Of a request or an answer without tensors."""


_Answer = tuple[int, float, Callable[[], None]]
"""The host that it goes to, its bytes, and what happens when it is there."""


@dataclass(frozen=True)
class Delivery:
    """What one shard of a server says to a worker, when it has arrived."""

    server: int
    shard: int
    answer: Answer | None = None
    waiting_s: float = 0.0
    """Until the request came that the answer depended on."""
    iteration: int = 0
    content: Any = None
    error: str | None = None
    is_in_turn: bool = False
    """Whether others wait until the server has heard that it has arrived."""


class Client(Protocol):
    """One worker, as servers reach it."""

    host: int

    @property
    def is_apart(self) -> bool:
        """Whether no server is on its host."""

    def gradients(self, server: int, shard: int) -> Sequence[Tensor]:
        """Where the worker computes them; it waits while they are looked at."""

    def parameters(self, server: int, shard: int) -> Sequence[Tensor]:
        """Where the worker wants them."""

    def deliver(self, delivery: Delivery) -> None: ...


@final
class VirtualServer:
    """Holds one key range. Every method is called on the timeline, when a request has arrived.

    Requests are worked on one after the other; an update takes the time of moving what it reads and writes through
    the host's memory.

    Args:
        index: which server of the group this is.
        host: where it runs.
        memory_bytes_per_s: of that host.
        request_s: what it is at each push, besides the update.
        reporter: gets a record for every gradient applied.
    """

    def __init__(
        self,
        timeline: EventQueue,
        network: Network,
        *,
        index: int,
        host: int,
        memory_bytes_per_s: float,
        reporter: Reporter,
        request_s: float = 0.0,
    ) -> None:
        self.index, self.host = index, host
        self.parts: list[Part] = []
        self.is_in_turn = False
        """Whether pieces are to come a few at a time."""
        self.clients: dict[int, Client] = {}
        self._timeline, self._network, self._reporter = timeline, network, reporter
        self._memory_bytes_per_s, self._request_s = memory_bytes_per_s, request_s
        self._free_s = 0.0
        self._arrived_s: dict[int, float] = {}  # each worker's last request
        self._released_s: dict[int, float] = {}  # when a shard last stopped to hold a worker's answer back
        self._answers: AnswerWindow[_Answer] = AnswerWindow(
            lambda: timeline.now_s, least_bytes=LEAST_ANSWERS * FRAME_BYTES
        )

    def configure(
        self, layout: Layout, pieces: KeyRange, optimizer: OptimizerSpec, rule: AdmissionRule, max_updates: int | None
    ) -> None:
        """Build the shards, as `ParameterService.configure`."""
        ranges = in_shards(pieces, whole=not optimizer.element_wise)
        rules = [rule.for_another_shard() for _ in ranges]
        if self.index == 0:
            rules[-1] = rule
        self.parts = [
            build_part(layout, pieces, optimizer, rule, max_updates=max_updates, memory=None)
            for pieces, rule in zip(ranges, rules, strict=True)
        ]
        self.is_in_turn = are_in_turn(self.parts)

    @functools.cached_property
    def _has_busy_neighbour(self) -> bool:
        """Whether a worker on this host has to push over a busier link than others."""
        clients = self.clients.values()
        return any(client.host == self.host for client in clients) and any(client.is_apart for client in clients)

    @property
    def follows(self) -> bool:
        """Whether it has to be told what the first server decided."""
        return self.parts[-1].shard.follows

    def part_bytes(self, shard: int) -> float:
        """Of one shard's parameters, or gradients."""
        return float(sum(tensor.nbytes for tensor in self.parts[shard].shard.parameters))

    # --- requests -----------------------------------------------------------------------------------------------

    def initialise(self, worker: int, shard: int, iteration: int) -> None:
        part = self.parts[shard].shard
        _copy(self.clients[worker].parameters(self.index, shard), part.parameters)
        part.iteration = iteration
        for each in self.clients:
            part.pulled(each)
        self._notify(worker, Delivery(self.index, shard))

    def push(
        self,
        worker: int,
        shard: int,
        clock: int,
        *,
        is_void: bool,
        pause_at: int,
        stop: bool,
        groups: Groups | None,
    ) -> None:
        part = self.parts[shard]
        self._arrived_s[worker] = self._timeline.now_s
        self._free_s = max(self._timeline.now_s, self._free_s) + self._request_s
        gradients = None if is_void else self.clients[worker].gradients(self.index, shard)
        own = part.own_groups(groups) if groups is not None else None
        self._guarded(
            worker,
            shard,
            lambda: part.shard.push(worker, clock, gradients, pause_at=pause_at, stop=stop, groups=own),
        )

    def wait(self, worker: int, shard: int, pause_at: int) -> None:
        self._arrived_s[worker] = self._timeline.now_s
        self._guarded(worker, shard, lambda: self.parts[shard].shard.wait(worker, pause_at=pause_at))

    def follow(self, worker: int, clock: int, contributors: Sequence[int]) -> None:
        """A worker brings what the first server decided."""
        for shard, part in enumerate(self.parts):
            if part.shard.follows:
                self._guarded(worker, shard, lambda part=part: part.shard.follow(worker, clock, contributors))  # type: ignore[misc]

    def received(self, worker: int) -> None:
        """The worker has one of the answers that go in turn."""
        self._answers.answered(worker)
        self._timeline.at(self._free_s, self._send_next)

    def leave(self, worker: int) -> None:
        for shard, part in enumerate(self.parts):
            self._answer(shard, part.shard.leave(worker))
        self._notify(worker, Delivery(self.index, 0))

    def pull(self, worker: int, shard: int) -> None:
        part = self.parts[shard].shard
        self._give(worker, shard)
        self._send(worker, self.part_bytes(shard), Delivery(self.index, shard, iteration=part.iteration))

    def get_state(self, worker: int) -> None:
        state: dict[str, Tensor] = {}
        first = 0
        for part in self.parts:
            state |= export_state(part.shard.optimizer, part.shard.parameters, first_piece=first)
            first += len(part.pieces)
        copied = {name: tensor.clone() for name, tensor in state.items()}
        num_bytes = float(sum(tensor.nbytes for tensor in copied.values()))
        self._send(worker, NOTICE_BYTES + num_bytes, Delivery(self.index, 0, content=copied))

    def set_state(self, worker: int, state: Mapping[str, Tensor]) -> None:
        first = 0
        for part in self.parts:
            import_state(part.shard.optimizer, part.shard.parameters, state, first_piece=first)
            first += len(part.pieces)
        self._notify(worker, Delivery(self.index, 0))

    # --- answers ------------------------------------------------------------------------------------------------

    def _guarded(self, worker: int, shard: int, ask: Callable[[], Sequence[Answer]]) -> None:
        """Trouble with a request is the asker's."""
        try:
            answers = ask()
        except (PacelineError, LookupError, ValueError, TypeError) as error:
            text = f"server {self.index}: {type(error).__name__}: {error}"
            self._notify(worker, Delivery(self.index, shard, error=text))
            return
        self._answer(shard, answers)

    def _answer(self, shard: int, answers: Sequence[Answer]) -> None:
        """Give every worker that is complete the current parameters, once the update is through."""
        now_s = self._timeline.now_s
        applied = self.parts[shard].shard.drain_applied()
        if applied:
            touched_bytes = self._touched_bytes(shard, len(applied))
            self._free_s = max(now_s, self._free_s) + touched_bytes / self._memory_bytes_per_s
        for answer in answers:
            self._give(answer.worker, shard)
            # As `ParameterService` counts: from the worker's latest arrival so far, and no moment twice.
            waiting_s = now_s - max(self._arrived_s[answer.worker], self._released_s.get(answer.worker, 0.0))
            self._released_s[answer.worker] = now_s
            delivery = Delivery(self.index, shard, answer, waiting_s, answer.iteration)
            if self.is_in_turn and self._has_busy_neighbour and self.clients[answer.worker].host != self.host:
                self._timeline.at(self._free_s, self._send_in_turn, answer.worker, shard, delivery)
            else:
                self._send(answer.worker, self.part_bytes(shard), delivery)
        if shard != len(self.parts) - 1:
            return
        for one in applied:
            self._reporter.emit(UpdateRecord(self.index, one.iteration, one.worker, one.clock, one.staleness))
        for answer in answers:
            if answer.contributors is not None:
                self.follow(answer.worker, answer.clock, answer.contributors)

    def _send_in_turn(self, worker: int, shard: int, delivery: Delivery) -> None:
        num_bytes, client = self.part_bytes(shard), self.clients[worker]
        arrive = partial(client.deliver, replace(delivery, is_in_turn=True))
        self._answers.put(worker, (client.host, num_bytes, arrive), num_bytes)
        self._send_next()

    def _send_next(self) -> None:
        """What may go now."""
        for _, (host, num_bytes, arrive) in self._answers.take():
            self._network.send(self.host, host, num_bytes, arrive, is_answer=True)

    def _give(self, worker: int, shard: int) -> None:
        """As they are now: the worker looks at them when the answer has arrived, and servers never change them."""
        part = self.parts[shard].shard
        _copy(part.parameters, self.clients[worker].parameters(self.index, shard))
        part.pulled(worker)

    def _notify(self, worker: int, delivery: Delivery) -> None:
        self._send(worker, NOTICE_BYTES, delivery)

    def _send(self, worker: int, num_bytes: float, delivery: Delivery) -> None:
        """After what the server is at."""
        client = self.clients[worker]
        answer = partial(self._network.send, is_answer=True)
        self._timeline.at(self._free_s, answer, self.host, client.host, num_bytes, client.deliver, delivery)

    def _touched_bytes(self, shard: int, num_gradients: int) -> float:
        part = self.parts[shard].shard
        return update_bytes(num_gradients, self.part_bytes(shard), state_bytes(part.optimizer, part.parameters))


def update_bytes(num_gradients: int, parameter_bytes: float, state_bytes: float) -> float:
    """What an update reads and writes: gradients, their mean if there are several, parameters and optimizer state."""
    num_passes = num_gradients + (2 if num_gradients > 1 else 0) + 2
    return num_passes * parameter_bytes + 2 * state_bytes


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> float:
    """Of the optimizer's state that is as large as its parameter, such as momentum."""
    return float(
        sum(
            value.nbytes
            for parameter in parameters
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.numel() == parameter.numel()
        )
    )


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
