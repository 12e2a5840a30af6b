"""What one process makes of rounds of local steps whose workers die and come, from who took part in each exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from paceline.lab.variant import Variant
from paceline.outer import dealt_out
from paceline.strategies.local_updates import LocalUpdates
from tests.gossip_replay import Replica


class Exchange(NamedTuple):
    """What each worker has trained on since the one before; of an empty part it counts nothing."""

    parts: dict[int, list[list[int]]]
    givers: dict[int, int]
    """Of those who join in it, whose state each has."""


def rounds_of(text: str) -> LocalUpdates:
    strategy = Variant.parse(text).strategy
    assert isinstance(strategy, LocalUpdates)
    return strategy


class Replay:
    """Of rounds that are of one length, but for those that end with a pass over the data.

    Args:
        make: a worker's model and optimizer as they are at the start.
    """

    def __init__(self, make: Callable[[], Replica], strategy: LocalUpdates) -> None:
        self._make, self._strategy = make, strategy
        self.shared = [nn.Parameter(each.detach().clone()) for each in make().model.parameters()]
        self._outer = strategy.outer.optimizer(self.shared)
        fragments = dealt_out([each.nbytes for each in self.shared], strategy.fragments)
        self._members = [[i for i, own in enumerate(fragments) if own == n] for n in range(strategy.fragments)]
        self.workers: dict[int, Replica] = {}
        self._sizes: list[dict[int, int]] = []  # of each step's parts
        self._left = [0] * strategy.fragments  # steps until each fragment left
        self._leaves_after = leaving_after(strategy)
        self._number = 0

    def exchange(self, one: Exchange) -> None:
        strategy, fragment = self._strategy, self._number % self._strategy.fragments
        before = self.workers
        self.workers = {rank: before.get(rank) or self._make() for rank in sorted(one.parts)}
        joined = [rank for rank in self.workers if before and rank not in before]
        for rank in joined:
            self.workers[rank].become(before[one.givers[rank]])
            self._set(rank, range(len(self.shared)))
        num_steps = max(map(len, one.parts.values()))
        leaves_after = min(num_steps, self._leaves_after[fragment])
        self._train(one, range(leaves_after))
        left = {rank: [each.clone() for each in self._own(rank)] for rank in self.workers}
        steps = self._sizes[self._left[fragment] :]
        self._left[fragment] = len(self._sizes)
        self._train(one, range(leaves_after, num_steps))
        self._join(fragment, steps, left)
        self._number += 1
        if self._number % strategy.fragments == 0:
            self._join_states(self._number // strategy.fragments, joined)
        for rank in joined:
            self.workers[rank].keep_pace_with(self.workers[min(self.workers)])

    def _train(self, one: Exchange, steps: range) -> None:
        for step in steps:
            parts = {rank: own[step] for rank, own in one.parts.items() if own}
            self._sizes.append({rank: len(part) for rank, part in parts.items()})
            for rank, part in parts.items():
                if part:
                    self.workers[rank].differentiate((part, 1.0))
                    self.workers[rank].step()

    def _join(self, fragment: int, steps: Sequence[dict[int, int]], left: dict[int, list[Tensor]]) -> None:
        """`steps`: each worker's samples since the fragment left before; `left`: what they had when it left now."""
        totals = [max(1, sum(sizes.get(rank, 0) for rank in self.workers)) for sizes in steps]
        rows, weights = {}, {}
        for rank in self.workers:
            shares = [sizes.get(rank, 0) / total for sizes, total in zip(steps, totals, strict=True)]
            weights[rank] = sum(shares) / len(shares)
            changes = [self.shared[index].detach() - left[rank][index] for index in self._members[fragment]]
            rows[rank] = parameters_to_vector(changes)
        parts = self.joint(rows, weights).split([self.shared[index].numel() for index in self._members[fragment]])
        for index, part in zip(self._members[fragment], parts, strict=True):
            self.shared[index].grad = part.view(self.shared[index].shape).clone()
        self._outer.step()
        self._outer.zero_grad()
        for rank in self.workers:
            self._set(rank, self._members[fragment], alpha=self._strategy.alpha)

    def joint(self, rows: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
        """Of what each has changed in a fragment, by its samples."""
        return torch.stack([weights[rank] * row for rank, row in rows.items()]).sum(dim=0)

    def _join_states(self, number: int, joined: Sequence[int]) -> None:
        kinds = {
            self._strategy.momentum_every: ("momentum_buffer", "exp_avg"),
            self._strategy.variance_every: ("exp_avg_sq",),
        }
        names = [name for period, each in kinds.items() if period and number % period == 0 for name in each]
        everybody = {
            rank: [each.optimizer.state[own] for own in each.model.parameters()] for rank, each in self.workers.items()
        }
        for index in range(len(self.shared)):
            for name in names:
                own = [states[index].get(name) for rank, states in everybody.items() if rank not in joined]
                if all(each is None for each in own):
                    continue  # another optimizer has it
                mean = torch.stack([torch.zeros_like(self.shared[index]) if each is None else each for each in own])
                for states in everybody.values():
                    if name in states[index]:
                        states[index][name].copy_(mean.mean(0))

    def _own(self, rank: int) -> list[Tensor]:
        return [each.detach() for each in self.workers[rank].model.parameters()]

    @torch.no_grad()
    def _set(self, rank: int, indices: Sequence[int], *, alpha: float = 0.0) -> None:
        for index, own in enumerate(self.workers[rank].model.parameters()):
            if index in indices:
                own.copy_(torch.lerp(self.shared[index].detach(), own, alpha))


def leaving_after(strategy: LocalUpdates) -> list[int]:
    """For each fragment, the steps from the exchange before its own until it leaves."""
    schedule, since, found = strategy.schedule, 0, []
    for step in range(1, strategy.every + 1):
        found += [step - since for _ in schedule.leaving(step)]
        since = step if schedule.due(step) else since
    return found
