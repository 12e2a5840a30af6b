"""What a round's clients contribute, joined over all workers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.aggregate import Aggregator, Contribution, gram_of
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.layout import TensorSpec, by_group
from paceline.strategies.base import Context
from paceline.strategies.bucketing import allocated
from paceline.strategies.elsewhere import SumOfClients
from paceline.strategies.federated.guard import Guard
from paceline.strategies.federated.rejecting import Rejecting
from paceline.strategies.federated.remembering import Memory
from paceline.strategies.federated.secured import Masks, SecureSum, flat

_TALLY = TensorSpec("tally", (5,), torch.float64)
"""The sum of weights, how many contributions there are, how many workers leave, and samples and batches of all."""


def _summed(dtype: torch.dtype) -> torch.dtype:
    """What is added up in single precision: a client's samples times its change may be more than a half has room for,
    and a sum of many loses what single ones add to it."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Joined(NamedTuple):
    """What a round came to, the same on every worker."""

    gradients: Sequence[Tensor]
    """The joined contributions, in memory that holds them until `Joining.clear`; of halves, in single precision."""
    num_contributions: int
    is_last: bool
    """A worker leaves, so that there is no further round."""
    trained: tuple[int, int] = (0, 0)
    """Samples and batches that all workers have said."""


@final
class Joining:
    """A round's contributions. Of an aggregator that streams, whose joint is the weighted mean, a worker keeps the sum
    alone; of others, and where clients are hostile or judged, every worker gets all contributions.

    Args:
        specs: of a contribution's tensors.
        num_changes: so many of them, the first ones, are what a client changed of parameters. How contributions lie to
            one another is told by these alone, and hostile clients change these alone.
        masks: has these summed so that nobody sees one client's; the others are then 0, as long as nobody changes
            them.
        rejecting: judges contributions; none: all count.
        guard: clips what hostile clients send, if anything does.

    Raises:
        UsageError: the context has hostile clients, who would have to know what masks hide.
    """

    def __init__(
        self,
        context: Context,
        specs: Sequence[TensorSpec],
        aggregator: Aggregator,
        *,
        num_changes: int,
        masks: Masks | None = None,
        rejecting: Rejecting | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard
        self._aggregator, self._specs, self._num_changes = aggregator, specs, num_changes
        self._corrupt, self._rejecting = context.corrupt_clients, rejecting
        if masks is not None and self._corrupt is not None:
            raise UsageError("hostile clients go by what honest ones send, which secure=masks hides; leave one out")
        self.memory = Memory(context.collective) if aggregator.remembers else None
        """What clients have sent so far, if the aggregator looks at it."""
        self._masks = masks
        self._secure: SumOfClients | None = None
        needs_each = self._corrupt is not None or masks is not None or rejecting is not None
        self._keeps_sum = aggregator.streams and not needs_each
        self._layout = by_group([*(replace(spec, dtype=_summed(spec.dtype)) for spec in specs), _TALLY])
        self._held: list[Contribution] = []
        self.join_among(context)
        # Where a round may have to be ended anew, this worker's part outlives the exchange.
        self._own_buffer = self._buffer if context.redealing is None else torch.zeros_like(self._buffer)
        *self._own_sums, self._own_tally = self._layout.views(self._own_buffer)
        self.clear()

    def join_among(self, context: Context) -> None:
        """Contributions are joined with these from here on. Collective call."""
        self._collective: Collective = context.collective
        self._buffer = allocated(context, self._layout.num_bytes)
        *self._sums, self._tally = self._layout.views(self._buffer)
        flats = [segment.view(self._buffer) for segment in self._layout.segments]
        summed = flats if self._keeps_sum else [self._tally]
        self._starts = [self._collective.persistent_all_reduce(flat, op="sum") for flat in summed]
        if self._rejecting is not None:
            self._rejecting.judge_among(context)
        if self._masks is not None:
            num_elements = sum(math.prod(spec.shape) for spec in self._specs[: self._num_changes])
            here = SecureSum(self._masks, context.collective, num_elements=num_elements, seed=context.seed)
            self._secure = context.clients or here

    def clear(self) -> None:
        """A new round begins."""
        self._own_buffer.zero_()
        self._held.clear()

    def add(self, contribution: Contribution) -> None:
        """One client's; its tensors are this round's to keep."""
        if self._keeps_sum:
            for total, tensor in zip(self._own_sums, contribution.gradients, strict=True):
                total.add_(tensor, alpha=contribution.weight)
        else:
            self._held.append(contribution)
        self._own_tally[0] += contribution.weight
        self._own_tally[1] += 1

    def join(self, *, round_number: int, leaves: bool, trained: tuple[int, int] = (0, 0)) -> Joined:
        """Over all workers. Collective call.

        Args:
            leaves: this worker takes part in no further round.
            trained: samples and batches, which are added up.

        Raises:
            UsageError: the round's contributions cannot be joined so, on all workers.
        """
        self._own_tally[2:] = torch.tensor([leaves, *trained], dtype=torch.float64)
        if self._own_buffer is not self._buffer:
            self._buffer.copy_(self._own_buffer)
        for work in [start() for start in self._starts]:
            work.wait()
        weight, num_contributions, num_leaving, samples, batches = self._tally.tolist()
        found = Joined(self._sums, int(num_contributions), num_leaving > 0, (int(samples), int(batches)))
        if self._secure is not None:
            return found._replace(num_contributions=self._sum_under_masks(self._secure, round_number))
        if not num_contributions:
            return found
        if self._keeps_sum:
            for total in self._sums:
                total.div_(weight)
            return found
        everything = sorted(self._gathered(), key=lambda contribution: contribution.sender)
        if self._corrupt is not None:
            everything = self._corrupted(self._corrupt, everything, round_number)
        if self._rejecting is not None:
            everything = self._rejecting.kept(everything, round_number)
            found = found._replace(num_contributions=len(everything))
            if not everything:
                return found
        try:
            gradients = self._aggregator.aggregate(everything, self._sums, gram=self._gram(everything))
            return found._replace(gradients=gradients)
        except ValueError as error:
            raise UsageError(
                f"round {round_number + 1}: aggregate={self._aggregator}: {error}; draw more clients (fraction), as "
                "many in each round (sampler=uniform)"
            ) from None

    def _corrupted(
        self,
        corrupt: Callable[[Sequence[Contribution], int], list[Contribution]],
        everything: Sequence[Contribution],
        round_number: int,
    ) -> list[Contribution]:
        """What hostile clients send in the place of what they have computed."""
        honest = list(map(self._changes, everything))
        sent = corrupt(honest, round_number)
        if self._guard is not None:
            sent = [each if each is own else self._guard.clipped(each) for each, own in zip(sent, honest, strict=True)]
        return [
            each._replace(tensors=[*changes.tensors, *each.tensors[self._num_changes :]])
            for each, changes in zip(everything, sent, strict=True)
        ]

    def _sum_under_masks(self, secure: SumOfClients, round_number: int) -> int:
        """The sums become the mean; returns over how many clients."""
        held = {each.sender: (each.weight, flat(each, self._num_changes)) for each in self._held}
        total = secure.total(held, round_number=round_number)
        if total.num_summed:
            sums = self._sums[: self._num_changes]
            for out, part in zip(sums, total.sum.split([out.numel() for out in sums]), strict=True):
                out.copy_((part / total.weight).view(out.shape))
        return total.num_summed

    def _gram(self, contributions: Sequence[Contribution]) -> Tensor | None:
        """Inner products of what clients changed; of all that they have changed so far, if the aggregator remembers."""
        changes = list(map(self._changes, contributions))
        if self.memory is not None:
            return self.memory.gram(changes)
        return None if self._aggregator.is_coordinate_wise else gram_of(changes)

    def _changes(self, contribution: Contribution) -> Contribution:
        return contribution._replace(tensors=contribution.tensors[: self._num_changes])

    def _gathered(self) -> list[Contribution]:
        """All workers' contributions, on each of them."""
        heads = self._collective.all_gather_object([(each.sender, each.weight) for each in self._held])
        stacks = [
            self._collective.all_gather(torch.stack([each.gradients[index] for each in self._held]))
            if self._held
            else self._collective.all_gather(torch.empty((0, *spec.shape), dtype=spec.dtype, device=self._tally.device))
            for index, spec in enumerate(self._specs)
        ]
        return [
            Contribution(sender, weight, "gradient", [stack[rank][number] for stack in stacks])
            for rank, own in enumerate(heads)
            for number, (sender, weight) in enumerate(own)
        ]
