"""Gossip: every worker takes its own steps, and mixes its model with its neighbours'."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final, get_args

from torch import Tensor, nn

from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.schedule import Every
from paceline.strategies.base import (
    Context,
    StepOutcome,
    Strategy,
    Synchronizer,
    option,
    require_choice,
)
from paceline.strategies.finite import checked, may_step
from paceline.strategies.gossip.averaging import Averaging
from paceline.strategies.gossip.links import Links
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.model import FlatModel
from paceline.strategies.gossip.push_sum import PushSum
from paceline.strategies.gossip.quasi_global import QuasiGlobal
from paceline.strategies.gossip.relay import Relay, require_tree
from paceline.strategies.gossip.running_sums import RunningSums
from paceline.strategies.own_state import OwnState, load_replica, of_replica
from paceline.strategies.replica import Replica, is_skipped_by_scaler, require_same_parameters
from paceline.strategies.traits import Neighbouring, Traits
from paceline.topology import Ring, Topology

Mode = Literal["average", "push-sum", "running-sums", "relay"]
Order = Literal["atc", "awc"]
_MIXERS: Mapping[str, type[Mixer]] = {
    "average": Averaging,
    "push-sum": PushSum,
    "running-sums": RunningSums,
    "relay": Relay,
}


@final
@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """Decentralized data parallelism: a worker exchanges models with its neighbours alone.

    `average` is D-PSGD (Lian et al., NeurIPS 2017), `push-sum` SGP (Assran et al., ICML 2019), `relay` RelaySGD
    (Vogels et al., NeurIPS 2021). Unlike there, any optimizer of the script may make the steps, and a gradient counts
    by its share of the global batch.

    >>> Gossip(topology=Ring()).traits.lock_step
    False
    """

    topology: Topology = option(
        Ring(), "with whom: see `paceline strategies --topology`; relay needs a tree, such as chain"
    )
    mode: Mode = option(
        "average",
        "average: mean with the neighbours; push-sum: sums and weights, for links that go one way; running-sums: "
        "push-sum that bears lost messages, each twice as large; relay: sums that travel along a tree",
    )
    order: Order = option(
        "atc",
        "atc: step, then mix (adapt then combine); awc: mix what was there before the gradient, then step, so that "
        "models move while it is computed (adapt while communicating)",
    )
    every: int = option(1, "steps from one exchange to the next")
    quasi_global: float = option(
        0.0, "momentum from how the mixed model moved, for SGD without a momentum of its own; 0: none"
    )
    own_scores: bool = option(True, "each worker evaluates its own model, too")

    def validate(self) -> None:
        require_choice("mode", self.mode, get_args(Mode))
        require_choice("order", self.order, get_args(Order))
        if self.every < 1:
            raise UsageError(f"every must be at least 1, not {self.every}")
        if not 0 <= self.quasi_global < 1:
            raise UsageError(f"quasi_global must be at least 0 and below 1, not {self.quasi_global}")
        if self.mode == "relay" and self.order == "awc":
            raise UsageError("order=awc is not for mode=relay, whose messages hold the step just made")

    def check(self, *, num_workers: int) -> None:
        topology = self.topology
        try:
            keeps_mean, joins_all = topology.keeps_mean(num_workers), topology.joins_all(num_workers)
            if self.mode == "relay":
                require_tree(topology, num_workers)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not joins_all:
            raise UsageError(f"under {topology} some of {num_workers} workers never hear of some others")
        if self.mode == "average" and not keeps_mean:
            raise UsageError(f"the weights of {topology} do not keep the mean of all models; use mode=push-sum")

    @property
    def traits(self) -> Traits:
        mixer = _MIXERS[self.mode]
        moved = Neighbouring(
            topology=self.topology,
            every=self.every,
            behind_computing=self.order == "awc",
            message_size=mixer.message_size,
        )
        return Traits(
            lock_step=False,
            traffic=(moved,),
            workers_differ=True,
            own_scores=self.own_scores,
            missing_messages=mixer.missing_messages,
            passes_attacks=True,
        )

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _GossipSynchronizer(self, context, replica)


@final
class _GossipSynchronizer(Synchronizer):
    def __init__(self, strategy: Gossip, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy, self._schedule = strategy, Every(strategy.every)
        self._model = FlatModel(replica)
        rank, size = context.rank, context.size
        self._mixer = _MIXERS[strategy.mode](strategy.topology, self._model.parcel, rank=rank, size=size)
        self._links = Links(context.collective, context.pacing)
        self._momentum = QuasiGlobal(self._model, strategy.quasi_global) if strategy.quasi_global else None
        self._weight = 1.0

    @property
    def timings(self) -> tuple[Timing, ...]:
        return self._links.timings

    def set_weight(self, weight: float) -> None:
        self._model.scale_gradients(self._weight / weight)  # what was accumulated counts with its own batch's weight
        self._weight = weight

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._momentum is not None:
            raise UsageError("quasi_global changes the gradients that are there; give step() no closure")
        policy, step = self._strategy.nonfinite, self.iteration + 1
        return checked(partial(self._weighed, closure), self.replica, policy, rank=self.context.rank, step=step)

    def _weighed(self, closure: Callable[[], Any]) -> Any:
        """What the closure adds counts with the batch's weight, as what there is does."""
        self._model.scale_gradients(1 / self._weight)
        loss = closure()
        self._model.scale_gradients(self._weight)
        return loss

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        require_same_parameters(self.replica)
        self._model.require_in_place(rank=self.context.rank, step=self.iteration + 1)
        applies = self.gradients_are_spent or may_step(
            self.replica, self._strategy.nonfinite, rank=self.context.rank, step=self.iteration + 1
        )
        self._model.corrupt(self.context, step=self.iteration)
        is_due = bool(self._schedule.due(self.iteration + 1))
        if is_due:
            self.require_joint_step()
        self._model.scale_gradients(self._weight)
        if self._momentum is not None:
            self._momentum.begin()
        if is_due and self._strategy.order == "awc":
            self._exchange()
        if applies:
            self._mixer.update(update)
        if is_due and self._strategy.order == "atc":
            self._exchange()
        if self._momentum is not None:
            self._momentum.end()
        self._model.scale_gradients(1 / self._weight)  # for a script that adds to them
        self.iteration += 1
        if self._strategy.order == "awc" and self._schedule.due(self.iteration + 1):
            self._start()
        applies = applies and not is_skipped_by_scaler(self.replica.optimizer)
        return StepOutcome(self.iteration, staleness=0 if applies else -1)

    def _exchange(self) -> None:
        if not self._links.are_busy:
            self._start()
        self._mixer.mix(self._number, self._links.wait())

    def _start(self) -> None:
        self._links.start(self._mixer.outgoing(self._number), self._mixer.incoming(self._number))

    @property
    def _number(self) -> int:
        """Of the next exchange, or the one under way."""
        return self.iteration // self._strategy.every

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        self._links.settle()  # what is on its way is read where it lies
        with self.averaged_model() as model:
            yield model

    def own_state(self) -> dict[str, OwnState]:
        kept = dict(self._mixer.state())
        if self._momentum is not None:
            kept |= self._momentum.state()
        return {**of_replica(self.replica), **{f"gossip.{name}": OwnState(tensor) for name, tensor in kept.items()}}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        load_replica(self.replica, own)
        for name, wanted in self.own_state().items():
            if name.startswith("gossip.") and name in own:
                wanted.tensor.copy_(own[name])
