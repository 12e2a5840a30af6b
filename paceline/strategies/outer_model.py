"""The parameters that workers share while each trains its own: in fragments, which are exchanged one by one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from paceline.aggregate import Aggregator
from paceline.arrays import is_finite
from paceline.buckets import Bucket
from paceline.comm.base import Timing, Work
from paceline.layout import by_group
from paceline.messages import Raw, from_frames, to_frames
from paceline.outer import Outer, dealt_out, mix, take_changes
from paceline.server.state import export_state, import_state
from paceline.strategies.base import Context
from paceline.strategies.bucketing import allocated
from paceline.strategies.coding import Coding
from paceline.strategies.digests import require_same
from paceline.strategies.exchange import Exchange
from paceline.strategies.own_state import OUTER, OwnState, taken_up
from paceline.strategies.replica import Replica

_SHARED = "shared."


@final
class OuterModel:
    """One copy of the trained parameters, and as much memory for their pseudo-gradients. Collective call.

    Args:
        outer: what steps with the mean pseudo-gradient.
        aggregator: joins the workers' pseudo-gradients.
        coding: what encodes them; none: they travel as they are.

    Raises:
        UsageError: the model has fewer tensors than fragments.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        *,
        num_fragments: int,
        outer: Outer,
        aggregator: Aggregator,
        coding: Coding | None = None,
    ) -> None:
        fragments = dealt_out([spec.num_bytes for spec in replica.specs], num_fragments)
        self._layout = layout = by_group(
            [replace(spec, group=own) for spec, own in zip(replica.specs, fragments, strict=True)]
        )
        self._aggregator = aggregator
        self.timing = Timing()
        """What coding takes."""
        self._lead_among(context, coding)
        self._local = replica.parameters
        self._names = [spec.name for spec in replica.specs]
        self._parameters = [nn.Parameter(parameter.detach().clone()) for parameter in replica.parameters]
        self._members = [[i for i, own in enumerate(fragments) if own == n] for n in range(num_fragments)]
        self._buckets = [[i for i, s in enumerate(layout.segments) if s.group == n] for n in range(num_fragments)]
        self._outer, self._optimizer = outer, outer.optimizer(self._parameters)
        self._left: dict[int, list[Tensor]] = {}  # what this worker had in fragments when they left it

    def exchange_among(self, context: Context, *, coding: Coding | None = None) -> None:
        """Exchange with these from here on. What codecs have left out is still owed. Collective call."""
        before = self._exchange
        self._lead_among(context, coding)
        self._exchange.carry_on(before)

    def _lead_among(self, context: Context, coding: Coding | None) -> None:
        self._lay_out(allocated(context, self._layout.num_bytes))
        flats = self._flats
        none = [torch.zeros(0, dtype=flat.dtype, device=flat.device) for flat in flats]
        buckets = [Bucket(flat, flat, flags) for flat, flags in zip(flats, none, strict=True)]
        self._context = context
        self._prepare = partial(
            Exchange,
            context.collective,
            buckets,
            layout=self._layout,
            timing=self.timing,
            aggregator=self._aggregator,
            senders=context.membership.ranks,
        )
        self.use(coding)
        self._works: dict[int, list[Work]] = {}

    def _lay_out(self, buffer: Tensor) -> None:
        self._changes = self._layout.views(buffer)
        self._flats = [segment.view(buffer) for segment in self._layout.segments]

    @torch.no_grad()
    def begin(self) -> None:
        """Rounds begin with what this worker has now: since it was prepared the script may have loaded weights.
        Collective call.

        Raises:
            TensorMismatch: workers have other parameters.
        """
        require_same(self._names, self._local, self._context.collective, when="before the first round")
        mix(self._parameters, self._local, alpha=0.0)

    def begin_alike(self) -> None:
        """This worker goes on from the shared parameters: it has changed none."""
        mix(self._local, self._parameters, alpha=0.0)

    def use(self, coding: Coding | None) -> None:
        """What encodes pseudo-gradients from here on, where nothing is under way. Collective call."""
        self._exchange = self._prepare(coding=coding)
        self._is_coded = coding is not None
        by_itself = coding is not None and not (coding.among_hosts and self._context.local_size > 1)
        self._largest = coding.codec.largest if coding is not None and by_itself else math.inf

    def keep(self, fragment: int) -> None:
        """What this worker has of it now is what `take` takes until it is joined, though it trains on meanwhile."""
        self._left[fragment] = [each.clone() for each in _of(self._members[fragment], self._local)]

    def take(self, fragment: int, *, weight: float) -> str | None:
        """Take the fragment's pseudo-gradients; the name of a tensor in which they are not finite, if there is one.

        Args:
            weight: what this worker's count in the mean, times the number of workers.
        """
        members = self._members[fragment]
        shared, own, changes = (_of(members, each) for each in (self._parameters, self._local, self._changes))
        take_changes(shared, self._left.get(fragment, own), changes, weight=weight)
        return self._not_finite(fragment)

    def unheld(self, fragment: int) -> str | None:
        """The name of a tensor of what was taken that this worker's codec does not hold, if there is one."""
        if math.isinf(self._largest):
            return None
        members = (index for index in self._members[fragment] if self._changes[index].numel())
        return next((self._names[i] for i in members if float(self._changes[i].abs().max()) > self._largest), None)

    def taken(self, fragment: int) -> list[Tensor]:
        """What was taken, where it lies until it is averaged."""
        return _of(self._members[fragment], self._changes)

    def leave_out(self, fragment: int) -> None:
        """What this worker changed is not to count."""
        for bucket in self._buckets[fragment]:
            self._flats[bucket].zero_()

    def start(self, fragment: int, *, step: int, weights: Sequence[float] = ()) -> None:
        """Begin to join what was taken over all workers. No two exchanges of a fragment have the same step.

        Args:
            weights: as `Exchange.start`.
        """
        self._works[fragment] = [
            self._exchange.start(bucket, step=step, weights=weights) for bucket in self._buckets[fragment]
        ]

    def has_started(self, fragment: int) -> bool:
        """Whether it is being averaged, among those whom this worker exchanges with."""
        return fragment in self._works

    def is_under_way(self) -> bool:
        """Whether a fragment is; moves it on."""
        under_way = [work for works in self._works.values() for work in works if not work.poll()]
        return bool(under_way)

    def wait(self, fragment: int) -> str | None:
        """Wait for the mean. Returns the name of a tensor in it that the codec did not hold, if there is one: on all
        workers."""
        for work in self._works.pop(fragment):
            work.wait()
        return self._not_finite(fragment) if self._is_coded else None

    @property
    def completes_alike(self) -> bool:
        """As `Exchange.completes_alike`."""
        return self._exchange.completes_alike

    @property
    def owes(self) -> bool:
        """As `Synchronizer.owes`, of changes."""
        return self._exchange.owes

    def means(self, fragments: Sequence[int]) -> list[memoryview]:
        """A copy of the fragments' means, which all workers are to join, for another worker's `take_means`."""
        return to_frames([flat.clone() for flat in self._flats_of(fragments)])

    def take_means(self, fragments: Sequence[int], frames: Sequence[Raw]) -> Sequence[Raw]:
        """The fragments' means, as another worker has them, take the place of what was under way. `exchange_among`
        comes before the next exchange. Returns what further frames there are."""
        # In other memory: what was under way may still write to the old one.
        self._lay_out(torch.zeros(self._layout.num_bytes, dtype=torch.uint8))
        flats = self._flats_of(fragments)
        num_frames = len(to_frames(flats))
        from_frames(frames[:num_frames], flats)
        self._works = {fragment: [] for fragment in fragments}
        return frames[num_frames:]

    def join(self, fragment: int, *, alpha: float, is_applied: bool = True) -> None:
        """Step with the mean, unless it is not to be applied, and have this worker go on from there, or part of the
        way."""
        members = self._members[fragment]
        self._left.pop(fragment, None)
        self._exchange.settle(is_applied=is_applied)
        if is_applied:
            for index in members:
                self._parameters[index].grad = self._changes[index]
            self._optimizer.step()
            self._optimizer.zero_grad()  # to none, so that the next fragment's step leaves these alone
        mix(_of(members, self._local), _of(members, self._parameters), alpha=alpha)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """This worker's model has the shared parameters meanwhile, and afterwards its own again."""
        own = [parameter.detach().clone() for parameter in self._local]
        mix(self._local, self._parameters, alpha=0.0)
        try:
            yield
        finally:
            mix(self._local, own, alpha=0.0)

    def _not_finite(self, fragment: int) -> str | None:
        if all(is_finite(self._flats[bucket]) for bucket in self._buckets[fragment]):
            return None
        return next(self._names[index] for index in self._members[fragment] if not is_finite(self._changes[index]))

    def _flats_of(self, fragments: Sequence[int]) -> list[Tensor]:
        return [self._flats[bucket] for fragment in fragments for bucket in self._buckets[fragment]]

    def is_local(self, index: int) -> bool:
        """Whether this worker's parameter differs from the shared one."""
        return not torch.equal(self._local[index], self._parameters[index])

    def own_state(self, *, with_shared: bool) -> dict[str, OwnState]:
        """The state of the outer optimizer, which all workers have alike, and of codecs.

        Args:
            with_shared: the model that is saved is what workers have; so with the shared parameters that differ from
                these.
        """
        shared = {
            f"{_SHARED}{index}": OwnState(parameter.detach(), "same")
            for index, parameter in enumerate(self._parameters)
            if with_shared and self.is_local(index)
        }
        state = export_state(self._optimizer, self._parameters)
        outer = {f"{OUTER}{name}": OwnState(tensor, "same") for name, tensor in state.items()}
        return {**shared, **outer, **self._exchange.own_state()}

    @staticmethod
    def without_others(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A saved state without a worker's parameters that were saved with no shared ones beside them: with these,
        workers of other strategies, or other options, were apart."""
        prefix = "parameters."
        return {
            name: tensor
            for name, tensor in own.items()
            if not name.startswith(prefix) or f"{_SHARED}{name.removeprefix(prefix)}" in own
        }

    def restore(self, own: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave, as far as it is there; this worker's model holds the shared parameters."""
        mix(self._parameters, self._local, alpha=0.0)
        state = taken_up(self._outer, own, tell=self._context.tell)
        import_state(self._optimizer, self._parameters, state)
        for index, parameter in enumerate(self._parameters):
            if (saved := own.get(f"{_SHARED}{index}")) is not None:
                parameter.data.copy_(saved)
        self._exchange.restore(own)


def _of(members: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[index].detach() for index in members]
