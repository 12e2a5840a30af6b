"""What one process makes of a gossip run whose workers die and come, from who took part in each exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paceline.outer import Outer
from paceline.topology import Topology

Batch = tuple[list[int], float]
"""Samples, and the weight that their gradient has."""
Exchange = Mapping[int, Sequence[Batch]]
"""What each worker that takes part has trained on since the one before; one that joins on nothing."""
NOBODY: Mapping[int, int] = {}


@dataclass
class Replica:
    """A worker's model and optimizer, as the script makes them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    @property
    def vector(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    @vector.setter
    def vector(self, values: Tensor) -> None:
        vector_to_parameters(values.clone(), self.model.parameters())

    def differentiate(self, batch: Batch) -> None:
        index, weight = batch
        self.optimizer.zero_grad()
        (weight * F.cross_entropy(self.model(self.inputs[index]), self.labels[index])).backward()

    def step(self, *, length: float = 1.0) -> None:
        before = self.vector
        self.optimizer.step()
        self.vector = before + length * (self.vector - before)
        if self.scheduler is not None:
            self.scheduler.step()

    def become(self, other: Replica) -> None:
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def keep_pace_with(self, other: Replica) -> None:
        """Take over the other's learning rates."""
        if self.scheduler is not None and other.scheduler is not None:
            self.scheduler.load_state_dict(other.scheduler.state_dict())
        for group, given in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            group["lr"] = given["lr"]


class Replay:
    """Args: as `Gossip` has them; `make`: a worker's model and optimizer as they are at the start."""

    def __init__(
        self,
        make: Callable[[], Replica],
        topology: Topology,
        *,
        mode: str = "average",
        order: str = "atc",
        every: int = 1,
        outer: Outer | None = None,
    ) -> None:
        self._make, self._topology, self._mode, self._order = make, topology, mode, order
        self._every, self._outer = every, outer
        self.workers: dict[int, Replica] = {}
        self._iteration, self._exchanges, self._epoch = 0, 0, 0
        self._weights: dict[int, float] = {}
        self._came: dict[tuple[int, int], tuple[Tensor, int]] = {}  # over a link, from the first place to the second
        self._slow: dict[int, tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def exchange(self, parts: Exchange, *, epoch: int, givers: Mapping[int, int] = NOBODY) -> None:
        """Local steps, and the exchange after them among those who take part.

        Args:
            epoch: of the membership; where it is another than before, weights and sums begin anew.
            givers: whose state each of those who join has; of whom nothing is said, that of the first in the exchange
                before. They differ where that one has died or left after it, before anybody gave his state.
        """
        ranks = sorted(parts)
        is_lost = bool(set(self.workers) - set(ranks))
        joined = self._take_in(ranks, givers)
        steps = self._iteration + max(map(len, parts.values()))
        awc = self._order == "awc" and steps % self._every == 0  # at the end of a pass all steps are made
        for number in range(max(map(len, parts.values()))):
            training = {rank: batches[number] for rank, batches in parts.items() if number < len(batches)}
            for rank, batch in training.items():
                self.workers[rank].differentiate(batch)
            if not is_lost:
                self.corrupt({rank: weight for rank, (_, weight) in training.items()})
            for rank in training:
                if not awc or number < len(parts[rank]) - 1:
                    self.workers[rank].step(length=1 / self._weights[rank])
        if epoch != self._epoch:
            self._epoch, self._weights, self._came = epoch, dict.fromkeys(ranks, 1.0), {}
        self._mix(ranks, self._exchanges)
        self._exchanges += 1
        for rank, batches in parts.items():
            if awc and batches:
                self.workers[rank].step(length=1 / self._weights[rank])
        for rank in joined:
            self.workers[rank].keep_pace_with(self.workers[ranks[0]])
        self._iteration = steps

    def corrupt(self, weights: Mapping[int, float]) -> None:
        """What hostile workers make of their gradients, which are there, times these weights."""

    def mean(self) -> Tensor:
        return torch.stack([worker.vector for worker in self.workers.values()]).mean(0)

    def _take_in(self, ranks: Sequence[int], givers: Mapping[int, int]) -> list[int]:
        """Returns who joins."""
        before = self.workers
        joined = [rank for rank in ranks if before and rank not in before]
        self.workers = {rank: before.get(rank) or self._make() for rank in ranks}
        for rank in joined:
            self.workers[rank].become(before[givers.get(rank, min(before))])
        for rank in ranks:
            self._weights.setdefault(rank, 1.0)
            if self._outer is not None and rank not in self._slow:
                self._slow[rank] = self._slow_of(self.workers[rank])
        return joined

    def _slow_of(self, worker: Replica) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        assert self._outer is not None
        slow = nn.Parameter(worker.vector)
        return slow, self._outer.optimizer([slow])

    def _mix(self, ranks: Sequence[int], number: int) -> None:
        values = torch.stack([self.workers[rank].vector for rank in ranks]).double()
        mixed = {"average": self._average, "outer": self._average, "push-sum": self._push, "relay": self._relay}[
            self._mode
        ](ranks, values, number)
        for rank, vector in zip(ranks, mixed, strict=True):
            if self._outer is not None:
                slow, update = self._slow[rank]
                slow.grad = slow.detach() - vector.float()
                update.step()
                vector = slow.detach()
            self.workers[rank].vector = vector.float()

    def _average(self, ranks: Sequence[int], values: Tensor, number: int) -> Tensor:
        return self._topology.matrix(number, len(ranks)) @ values

    def _push(self, ranks: Sequence[int], values: Tensor, number: int) -> Tensor:
        linked = (self._topology.matrix(number, len(ranks)) > 0).double()
        shares = linked / linked.sum(0)  # column by column: what a sender gives away
        weights = torch.tensor([self._weights[rank] for rank in ranks], dtype=torch.float64)
        sums, after = shares @ (values * weights[:, None]), shares @ weights
        self._weights = dict(zip(ranks, after.tolist(), strict=True))
        return sums / after[:, None]

    def _relay(self, ranks: Sequence[int], values: Tensor, number: int) -> Tensor:
        size = len(ranks)
        near = [sorted(self._topology.neighbours(0, place, size).receives_from) for place in range(size)]
        none = torch.zeros_like(values[0]), 0
        came = {}
        for place in range(size):
            for other in near[place]:
                behind = [self._came.get((third, place), none) for third in near[place] if third != other]
                total = values[place] + sum((each for each, _ in behind), torch.zeros_like(values[0]))
                came[place, other] = total, 1 + sum(count for _, count in behind)
        self._came = came
        means = []
        for place in range(size):
            got = [came[other, place] for other in near[place]]
            total = values[place] + sum((each for each, _ in got), torch.zeros_like(values[0]))
            means.append(total / (1 + sum(count for _, count in got)))
        return torch.stack(means)
