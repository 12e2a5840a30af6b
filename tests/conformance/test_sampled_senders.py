"""A rule that a user writes: some clients are sampled each round, and each worker plays several of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor

from paceline.aggregate import Aggregator, Contribution
from paceline.engines.world import current
from paceline.errors import RunFailed
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, ProtocolError
from paceline.server.spec import OptimizerSpec, Push
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Traits
from tests.conformance import local_engine, virtual_engine

NUM_CLIENTS, NUM_SAMPLED, NUM_ROUNDS, NUM_ELEMENTS = 10, 4, 8, 100
SAMPLES = [5, 80, 20, 10, 10, 35, 60, 5, 15, 40]
"""Of each client."""


class SampledRounds(AdmissionRule):
    """The update of a round is made when all clients that were drawn for it are there; client c is worker c mod n's."""

    def __init__(self, members: Membership) -> None:
        super().__init__(members)
        self._round = 0
        self._here: set[int] = set()

    def for_another_shard(self) -> AdmissionRule:
        return SampledRounds(self.members)

    def worker_of(self, sender: int) -> int:
        return sender % self.members.size

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        if clock != self._round or sender not in self._due():
            raise ProtocolError(f"client {sender} is not due in round {self._round}")
        self._here.add(sender)
        return self._close_if_full()

    def is_held(self, sender: int) -> bool:
        return sender in self._here

    def is_admitted(self, worker: int) -> bool:
        return any(self.worker_of(sender) == worker for sender in self._due())

    def clock_of(self, worker: int) -> int:
        return self._round

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        return self._close_if_full()

    def _due(self) -> set[int]:
        return {c for c in sampled(self._round) if self.worker_of(c) in self.active} - self._here

    def _close_if_full(self) -> tuple[int, ...]:
        if self._due() or not self._here:
            return ()
        complete = tuple(sorted(self._here))
        self._here.clear()
        self._round += 1
        return complete


@dataclass(frozen=True, kw_only=True)
class Federated(Strategy):
    """Servers only: the script speaks to them itself."""

    servers: int = 1

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=False, unit="round", tells_stop=True, num_servers=self.servers)

    def admission_rule(self, members: Membership) -> AdmissionRule:
        return SampledRounds(members)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        raise AssertionError("the script speaks to the servers itself")


def sampled(number: int) -> list[int]:
    """The clients of a round. In rounds 2 and 5, all are the same worker's."""
    clients = range(NUM_CLIENTS) if number not in (2, 5) else range(number % 2, NUM_CLIENTS, 2)
    return sorted(random.Random(number).sample(clients, NUM_SAMPLED))


def trained(client: int, model: Tensor) -> Tensor:
    """What a client makes of the model, from its own data."""
    return model + 0.5 * (torch.sin(torch.arange(NUM_ELEMENTS) * (client + 1.0)) - model)


def play(out: Path) -> None:
    """A worker's script."""
    world = current()
    assert world is not None
    store, rank, size = world.context.store, world.context.rank, world.context.size
    assert store is not None
    layout = by_group([TensorSpec("weight", (NUM_ELEMENTS,), torch.float32)])
    parameters, deltas = store.allocate(layout.num_bytes), store.allocate(layout.num_bytes)
    (model,), (delta,) = layout.views(parameters), layout.views(deltas)
    model.fill_(1.0 if rank == 0 else 7.0)
    store.attach(layout, OptimizerSpec(torch.optim.SGD, {"lr": 1.0}, ({"lr": 1.0},), True), parameters, deltas)
    store.pull()
    number, played = 0, set[tuple[int, int]]()
    while number < NUM_ROUNDS:
        mine = [c for c in sampled(number) if c % size == rank and (number, c) not in played]
        if mine:
            played.add((number, mine[0]))
            delta.copy_(trained(mine[0], model) - model)
            push = Push(pause_at=NUM_ROUNDS, sender=mine[0], weight=float(SAMPLES[mine[0]]), kind="delta")
            number = store.exchange(push).iteration
        else:
            number = store.wait_for_admission(pause_at=NUM_ROUNDS).iteration
    store.pull()
    torch.save(model.clone(), out / f"{rank}.pt")


def expected() -> Tensor:
    model = torch.full((NUM_ELEMENTS,), 1.0)
    for number in range(NUM_ROUNDS):
        clients = sampled(number)
        total = sum(SAMPLES[c] for c in clients)
        model = model + torch.stack([(trained(c, model) - model) * SAMPLES[c] for c in clients]).sum(0) / total
    return model


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "engine",
    [
        partial(local_engine.run, servers_are_local=True),
        partial(local_engine.run, servers_are_local=False),
        partial(local_engine.run, servers_are_local=[1]),
        virtual_engine.run,
    ],
    ids=["beside", "elsewhere", "beside one", "virtual"],
)
def test_two_workers_play_ten_clients(engine: Callable[..., Any], servers: int, tmp_path: Path) -> None:
    engine(partial(play, tmp_path), strategy=Federated(servers=servers), workers=2, out=tmp_path / "run")
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected(), rtol=1e-5, atol=1e-6)


@final
class Refusing(Aggregator):
    def aggregate(self, contributions: Sequence[Contribution], out: Sequence[Tensor]) -> Sequence[Tensor]:
        raise ValueError("these cannot be joined")


class Unjoinable(Federated):
    def aggregator(self) -> Aggregator:
        return Refusing()


def test_a_server_that_fails_ends_a_virtual_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"^server 0 failed after step 0: ValueError: these cannot be joined"):
        virtual_engine.run(partial(play, tmp_path), strategy=Unjoinable(), workers=2, out=tmp_path / "run")
