"""Some of many senders are drawn for each round; their changes, weighted, make one outer step on the servers.

Workers play the senders, one after the other: federated averaging (McMahan et al., AISTATS 2017, algorithm 1).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from paceline.aggregate import Contribution
from paceline.comm.base import Store, Timing
from paceline.errors import UsageError
from paceline.layout import by_group
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, ProtocolError
from paceline.server.spec import OptimizerSpec, Push, Reply
from paceline.strategies import Entry
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, option
from paceline.strategies.finite import may_step
from paceline.strategies.flat import lay_parameters
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Served, Traits
from paceline.transform import ClipNorm, outward


@final
@dataclass(frozen=True, kw_only=True)
class Sampled(Strategy):
    senders: int = option(10, "senders there are")
    drawn: int = option(4, "senders drawn for a round; a multiple of the number of workers")
    every: int = option(2, "local steps of a sender's turn")
    servers: int = option(1, "number of servers")
    clip: float = option(math.inf, "largest 2-norm of a sender's change")

    def check(self, *, num_workers: int) -> None:
        if self.drawn % num_workers:
            raise UsageError(f"drawn={self.drawn} senders cannot be dealt evenly to {num_workers} workers")

    @property
    def traits(self) -> Traits:
        traffic = (Served(every=self.every),)
        return Traits(lock_step=False, unit="round", tells_stop=True, num_servers=self.servers, traffic=traffic)

    def admission_rule(self, members: Membership) -> AdmissionRule:
        return _Rounds(self, members)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        assert context.store is not None
        return _Sampled(self, context, context.store, replica)

    def of_round(self, number: int) -> list[int]:
        """The senders of a round; the i-th is played by worker i modulo the number of workers."""
        return random.Random(number).sample(range(self.senders), self.drawn)


@final
class _Rounds(AdmissionRule):
    """A round's update is made when every sender drawn for it has pushed."""

    joins = True

    def __init__(self, strategy: Sampled, members: Membership) -> None:
        super().__init__(members)
        self._strategy, self._clock, self._first_round = strategy, 0, 0
        self._due = self._drawn()
        self._here: list[int] = []

    def begin_at(self, iteration: int) -> None:
        self._first_round = iteration
        self._due = self._drawn()

    def for_another_shard(self) -> AdmissionRule:
        return _Rounds(self._strategy, self.members)

    def worker_of(self, sender: int) -> int:
        return self._drawn().get(sender, -1)

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        if clock != self._clock or sender not in self._due:
            raise ProtocolError(f"sender {sender} is not due at clock {self._clock}")
        del self._due[sender]
        self._here.append(sender)
        return self._close_if_full()

    def is_held(self, sender: int) -> bool:
        return sender in self._here

    def is_admitted(self, worker: int) -> bool:
        return worker in self._due.values()

    def clock_of(self, worker: int) -> int:
        return self._clock

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        self._due = {sender: player for sender, player in self._due.items() if player in self.active}
        return self._close_if_full()

    def _drawn(self) -> dict[int, int]:
        """This round's senders, and who plays each."""
        ranks = self.members.ranks
        drawn = self._strategy.of_round(self._first_round + self._clock)
        return {sender: ranks[i % len(ranks)] for i, sender in enumerate(drawn)}

    def _close_if_full(self) -> tuple[int, ...]:
        if self._due or not self._here:
            return ()
        complete = tuple(sorted(self._here))
        self._here, self._clock = [], self._clock + 1
        self._due = {sender: player for sender, player in self._drawn().items() if player in self.active}
        return complete


@final
class _Sampled(Synchronizer):
    def __init__(self, strategy: Sampled, context: Context, store: Store, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy, self._store = strategy, store
        layout = by_group(replica.specs)
        self._parameters, self._changes = store.allocate(layout.num_bytes), store.allocate(layout.num_bytes)
        lay_parameters(replica, layout, self._parameters)
        self._flats = [segment.view(self._parameters) for segment in layout.segments]
        self._deltas = [segment.view(self._changes) for segment in layout.segments]
        one = {"lr": 1.0}
        spec = OptimizerSpec(torch.optim.SGD, one, tuple(one for _ in replica.optimizer_spec.groups), element_wise=True)
        store.attach(layout, spec, self._parameters, self._changes)
        self._steps = self._turns = 0
        self._begin_turn()

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._store.timing,)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        if may_step(self.replica, self._strategy.nonfinite, rank=self.context.rank, step=self._steps + 1):
            update()
        self._steps += 1
        if self._steps % self._strategy.every:
            return StepOutcome(self.iteration)
        mine = self._strategy.of_round(self.iteration)[self.context.rank :: self.context.size]
        sender = mine[self._turns]
        self._turns += 1
        changes = [flat - start for flat, start in zip(self._flats, self._start, strict=True)]
        guarded = outward((ClipNorm(self._strategy.clip),), Contribution(sender, 1.0 + sender, "delta", changes))
        for delta, change in zip(self._deltas, guarded.tensors, strict=True):
            delta.copy_(change)
        weight = guarded.weight
        push = Push(pause_at=pause_at, stop=self.stop_vote(), sender=sender, weight=weight, kind="delta")
        return self._taken(self._store.exchange(push))

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        return self._taken(self._store.wait_for_admission(pause_at=pause_at))

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        local = [flat.clone() for flat in self._flats]
        self._store.pull()
        with super().global_model() as model:
            yield model
        for flat, before in zip(self._flats, local, strict=True):
            flat.copy_(before)

    def leave(self) -> None:
        self._store.leave()

    def optimizer_state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        self._store.load_state({}, iteration=iteration)
        self.iteration = iteration
        self._begin_turn()

    def _taken(self, reply: Reply) -> StepOutcome:
        if reply.iteration > self.iteration:
            self.iteration, self._turns = reply.iteration, 0
        self._begin_turn()
        return StepOutcome(self.iteration, reply.stop, 0, reply.admitted)

    def _begin_turn(self) -> None:
        """Another sender's turn: from the servers' parameters, with a fresh optimizer."""
        self._start = [flat.clone() for flat in self._flats]
        self.replica.optimizer.state.clear()


ENTRY = Entry(name="sampled", strategy=Sampled, summary="sampled senders, weighted changes, an outer step on servers")
