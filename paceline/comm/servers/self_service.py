"""A worker that serves itself from lent shards: it pushes its gradient, and makes the updates if these are due."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.aggregate import MEAN, Contribution
from paceline.comm.servers.loan import CLOCK, HAS_PUSHED, ITERATION, NUM_APPLIED, PULLED_AT, Loan, Version
from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.mutex import all_of
from paceline.elastic.lanes import Done
from paceline.errors import PeerLost
from paceline.server.optimizer import step_of
from paceline.server.part import build_pieces
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec


class Served(NamedTuple):
    """What came of a worker's push."""

    iteration: int
    clock: int
    """The clock of the worker's next gradient."""
    staleness: int


@dataclass
class _Side:
    """A version of the shard as this worker updates it."""

    version: Version
    parameters: list[Tensor]
    step: Callable[[], object]


@final
class SelfService:
    """
    Args:
        loan: shared with the server and all other workers.
        parameters: where this worker wants them, one tensor a piece.
        spec: of the optimizer that the server has, too.
        open_gradients: gives each borrower's, one tensor a piece, where the terms say that they lie. Raises PeerLost.
    """

    def __init__(
        self,
        loan: Loan,
        *,
        worker: int,
        pieces: KeyRange,
        parameters: Sequence[Tensor],
        spec: OptimizerSpec,
        open_gradients: Callable[[Sequence[Sequence[int]]], list[list[Tensor]]],
    ) -> None:
        self.loan = loan
        self._worker, self._pieces, self._spec, self._open_gradients = worker, pieces, spec, open_gradients
        self._parameters = list(parameters)
        self._own = loan.starts[worker]
        self._text = b""
        self._joins = True  # an update needs every worker's gradient
        self._max_updates = math.inf
        self._starts: dict[int, int] = {}  # of each borrower
        self._addresses: Sequence[Sequence[int]] = ()  # of the borrowers' gradients
        self._sides: list[_Side] = []
        self._contributions: dict[int, Contribution] = {}  # each borrower's
        self._sums = [torch.zeros_like(parameter) for parameter in parameters]
        self._number = self._clock = self._pulled_at = 0  # the present loan, and what was so at the last push
        self._served: Served | None = None

    def may_push(self) -> bool:
        """Whether the next push is for this worker itself, not for the server; the lock must be held."""
        loan, number = self.loan, self.loan.number
        if not number or not loan.has_room():
            return False
        if number != self._number and not self._has_learnt():
            return False
        return loan.iteration < self._max_updates

    def push(self, done: Done | None) -> None:
        """Contribute this worker's gradient, which it may; the lock must be held."""
        loan, self._served = self.loan, None  # what came of a push that another server lacked, which a message took
        index = loan.in_force
        version = self._sides[index].version
        words = version.words
        if done is not None:
            version.pushed(self._own, done)
        self._clock, self._pulled_at = words[self._own + CLOCK], words[self._own + PULLED_AT]
        if not self._joins:
            self._update(index, (self._worker,))
            return
        words[self._own + HAS_PUSHED] = 1
        if all(words[start + HAS_PUSHED] for start in self._starts.values()):
            self._update(index, list(self._starts))
            loan.wake()

    @property
    def is_taken_back(self) -> bool:
        """Whether the server has had the shard since the last push."""
        return self.loan.number != self._number

    @property
    def has_gone_on(self) -> bool:
        """Whether the last push is part of an update."""
        return (
            self._served is not None or self._sides[self.loan.in_force].version.words[self._own + CLOCK] != self._clock
        )

    def take(self) -> Served:
        """Say what came of the last push, which has gone on, and put that update's parameters in place."""
        # No lock, which whoever made the update may still hold: the next update needs this worker.
        served, self._served = self._served or self._receive(self.loan.in_force), None
        return served

    def _receive(self, index: int) -> Served:
        side = self._sides[index]
        for own, parameter in zip(self._parameters, side.parameters, strict=True):
            own.copy_(parameter)
        iteration = side.version.words[ITERATION]
        return Served(iteration, self._clock + 1, iteration - 1 - self._pulled_at)

    def _update(self, index: int, workers: Sequence[int]) -> None:
        """Make of version `index` the next one, with the gradients of these workers."""
        loan, new = self.loan, self._sides[1 - index]
        new.version.copy_(self._sides[index].version)
        joined = MEAN.aggregate([self._contributions[worker] for worker in workers], self._sums)
        for parameter, gradient in zip(new.parameters, joined, strict=True):
            parameter.grad = gradient
        new.step()
        words = new.version.words
        words[ITERATION] = iteration = words[ITERATION] + 1
        for worker in workers:
            start = self._starts[worker]
            clock, staleness = words[start + CLOCK], iteration - 1 - words[start + PULLED_AT]
            loan.note(words[NUM_APPLIED], (iteration, worker, clock, staleness))
            words[NUM_APPLIED] += 1
            words[start + CLOCK], words[start + PULLED_AT], words[start + HAS_PUSHED] = clock + 1, iteration, 0
            new.version.counted(start)
        loan.put_in_force(1 - index)
        self._served = self._receive(1 - index)

    def _has_learnt(self) -> bool:
        """Learn the terms of the present loan. Returns whether they are for this worker, and it reaches all others."""
        text = self.loan.read_terms()
        if text != self._text:
            terms = json.loads(text)
            borrowers, addresses = terms["borrowers"], terms["gradients"]
            if self._worker not in borrowers:  # others take it for dead
                return False
            if addresses != self._addresses:
                try:
                    gradients = self._open_gradients(addresses)
                except PeerLost:  # one that has just died
                    return False
                pairs = zip(borrowers, gradients, strict=True)
                self._contributions = {rank: Contribution(rank, 1.0, "gradient", own) for rank, own in pairs}
                self._addresses = addresses
            self._starts = {rank: self.loan.starts[rank] for rank in borrowers}
            self._joins = terms["joins"]
            self._max_updates = math.inf if terms["max_updates"] is None else terms["max_updates"]
            self._sides = [self._side(version, terms) for version in self.loan.versions]
            self._text = text
        self._number = self.loan.number
        return True

    def _side(self, version: Version, terms: Mapping[str, Any]) -> _Side:
        layout = self.loan.layout
        optimizer, parameters, _ = build_pieces(layout, self._pieces, self._spec, version.parameters)
        for own, told in zip(optimizer.param_groups, terms["groups"], strict=True):
            own.update({name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})
        for name, tensor in version.states(terms["states"]).items():
            index, key = name.split(".", 1)
            optimizer.state[parameters[int(index)]][key] = tensor
        return _Side(version, parameters, step_of(optimizer))


@final
class SelfServices:
    """Those of all servers of a group: all of them have a push, or none does."""

    def __init__(self, services: Sequence[SelfService]) -> None:
        self._services = services

    def push(self, done: Done | None = None) -> bool:
        """Contribute this worker's gradient; false, and nothing done, where that is for some server.

        A worker that is killed in the midst may have counted it on some servers. Where they go on without it, the
        others find it in its memory (`whole_pushes.py`).

        Args:
            done: what the worker has done when this counts.
        """
        if not all(service.loan.number for service in self._services):
            return False
        with all_of([service.loan.lock for service in self._services]):
            if not all(service.may_push() for service in self._services):
                return False
            for service in self._services:
                service.push(done)
        return True

    @property
    def is_over(self) -> bool:
        """Whether the last push is part of updates, or a server has taken its shard back."""
        # In this order: whoever makes updates makes all of them before a shard can be taken back.
        is_taken_back = any(service.is_taken_back for service in self._services)
        return is_taken_back or self._have_gone_on()

    def _have_gone_on(self) -> bool:
        have_gone_on = all(service.has_gone_on for service in self._services)
        futex.fence()  # what they have made is read after this
        return have_gone_on

    def sleep(self, timeout_s: float) -> None:
        """Sleep until the last push is over, or for no reason."""
        self._services[-1].loan.sleep(timeout_s, unless=lambda: self.is_over)

    def take(self) -> list[Served] | None:
        """Once the last push is over, say what came of it on each server, and put its parameters in place. None: a
        server took its shard back before, and this worker is to send the push to all of them."""
        return [service.take() for service in self._services] if self._have_gone_on() else None
