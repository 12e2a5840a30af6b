"""Rounds of federated strategies in tests: players, models, and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from paceline.attacks import parse
from paceline.comm.base import Collective
from paceline.membership import Membership
from paceline.roster import Roster
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.context import Redealing
from paceline.strategies.hostility import under_attack
from paceline.strategies.replica import describe
from tests.unit.virtual_world import VirtualWorld


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def held_out(model: nn.Module) -> dict[str, float]:
    """What a server's own samples say, whose optimum is 12."""
    loss = (float(next(model.parameters()).detach()) - 12) ** 2 / 2
    return {"loss": loss, "accuracy": 1 - loss / 100}


class Player:
    """A script's loop over passes, without a session: clients are (a, b, number of steps) of a (x - b)^2 / 2."""

    def __init__(
        self,
        collective: Collective,
        strategy: Strategy,
        clients: Sequence[tuple[float, float, int]],
        *,
        sizes: Sequence[int] | None = None,
        attacks: Sequence[str] = (),
        momentum: float = 0.0,
        told: list[Mapping[str, Any]] | None = None,
        redealing: Redealing | None = None,
    ) -> None:
        participation = strategy.participation()
        assert participation is not None
        if redealing is not None:
            participation = participation.kept_by_all()
        rank, size = collective.rank, collective.size
        num_steps = [steps for _, _, steps in clients]
        self._roster = Roster(
            participation, sizes=sizes or num_steps, num_batches=num_steps, rank=rank, ranks=range(size), seed=0
        )
        self.model = Quadratic()
        self._optimizer: Optimizer = SGD(self.model.parameters(), lr=0.1, momentum=momentum)
        device = torch.device("cpu")
        context = Context(rank, Membership.first(size), rank, size, device, collective, roster=self._roster)
        context = under_attack(parse(attacks), context, strategy.traits)
        if told is not None:
            events, is_first = told, rank == 0
            tell = lambda name, details: events.append({"name": name, **details}) if is_first else None  # noqa: E731
            context = replace(context, evaluate=held_out, tell=tell)
        self.context = context = replace(context, redealing=redealing)
        self.synchronizer: Synchronizer = strategy.bind(context, describe(self.model, self._optimizer))
        self._clients, self._number = clients, 0

        self.synchronizer.start()

    def go_to(self, num_rounds: int) -> float:
        """Play until so many rounds are over; the server's parameter."""
        while True:
            outcome = self.synchronizer.end_turn()
            while not outcome.admitted and outcome.iteration < num_rounds:
                outcome = self.synchronizer.wait_for_admission(pause_at=0)
            if outcome.iteration == num_rounds:
                return self.parameter()
            self.synchronizer.begin_turn()
            a, b, num_steps = self._clients[self._roster.turn(self._number).client]
            self._number += 1
            for _ in range(num_steps):
                self._optimizer.zero_grad()
                (a * (self.model.x - b) ** 2 / 2).sum().backward()
                self.synchronizer.step(self._optimizer.step, pause_at=0)

    def parameter(self) -> float:
        with self.synchronizer.global_model() as model:
            return float(next(model.parameters()).detach())


def after(
    strategy: Strategy,
    clients: Sequence[tuple[float, float, int]],
    *,
    rounds: int,
    workers: int = 2,
    attacks: Sequence[str] = (),
    told: list[Mapping[str, Any]] | None = None,
) -> float:
    found = VirtualWorld(workers).run(
        lambda collective: Player(collective, strategy, clients, attacks=attacks, told=told).go_to(rounds)
    )
    assert len(set(map(repr, found))) == 1
    return float(found[0])


SPREAD = [(1.0, number**1.7, 1) for number in range(9)]
EVERYBODY = {"clients": 3, "fraction": 1.0, "weights": "equal"}
CURVED = [(1.0, 1.0, 5), (2.0, 0.0, 5), (4.0, -2.0, 5)]
UNEVEN = [(1.0, 1.0, 1), (1.0, 0.0, 3), (1.0, -2.0, 10)]
