"""Gossip: every worker takes its own steps, and mixes its model with its neighbours'."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final, get_args

from paceline.codec import Codec
from paceline.errors import UsageError
from paceline.outer import Momentum, Outer
from paceline.strategies.base import Context, Strategy, Synchronizer, option, require_choice
from paceline.strategies.coding import Scope, of_neighbours, require_of_neighbours
from paceline.strategies.gossip.averaging import Averaging
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.outer_step import OuterStep
from paceline.strategies.gossip.push_sum import PushSum
from paceline.strategies.gossip.relay import Relay, require_tree
from paceline.strategies.gossip.running_sums import RunningSums
from paceline.strategies.gossip.shared_estimates import SharedEstimates
from paceline.strategies.gossip.synchronizer import GossipSynchronizer
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Neighbouring, Traits
from paceline.topology import Ring, Topology

Mode = Literal["average", "push-sum", "running-sums", "relay", "outer"]
Order = Literal["atc", "awc"]
_MIXERS: Mapping[str, type[Mixer]] = {
    "average": Averaging,
    "push-sum": PushSum,
    "running-sums": RunningSums,
    "relay": Relay,
    "outer": OuterStep,
}
_OUTER = Momentum(lr=0.7, momentum=0.5)


@final
@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """Decentralized data parallelism: a worker exchanges models with its neighbours alone.

    `average` is D-PSGD (Lian et al., NeurIPS 2017), `push-sum` SGP (Assran et al., ICML 2019), `relay` RelaySGD
    (Vogels et al., NeurIPS 2021), `outer` NoLoCo (Kolehmainen et al., 2025). Unlike there, any optimizer of the script
    may make the steps, and a gradient counts by its share of the global batch.

    >>> Gossip(topology=Ring()).traits.lock_step
    False
    """

    topology: Topology = option(
        Ring(), "with whom: see `paceline strategies --topology`; relay needs a tree, such as chain"
    )
    mode: Mode = option(
        "average",
        "average: mean with the neighbours; push-sum: sums and weights, for links that go one way; running-sums: "
        "push-sum that bears lost messages, each twice as large; relay: sums that travel along a tree; outer: an outer "
        "step from where a worker was after the exchange before towards the mean with the neighbours",
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
    outer: Outer = option(_OUTER, "with mode=outer, what makes that step: momentum, nesterov, adam, average or torch")
    codec: Codec | None = option(
        None,
        "the form in which models' differences to what neighbours know travel, such as int8 or top-k; none: models",
    )
    codec_scope: Scope = option("links", "links: nothing is coded where all workers are on one host; all: everywhere")
    consensus_step: float | Literal["auto"] = option(
        "auto",
        "with a codec, how far to go to the weighted mean of what is known of the neighbours; auto: all the way, or "
        "twice the part of the elements that the codec sends",
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
        if self.mode == "outer":
            self.outer.require_possible()
            if self.quasi_global:
                raise UsageError("quasi_global is not for mode=outer, whose outer step has a momentum of its own")
        elif self.outer != _OUTER:
            raise UsageError(f"outer={self.outer} has no effect with mode={self.mode}; use mode=outer")
        self._require_codec()

    def _require_codec(self) -> None:
        require_choice("codec_scope", self.codec_scope, get_args(Scope))
        require_of_neighbours(self.codec, self.codec_scope)
        if self.codec is None and self.consensus_step != "auto":
            raise UsageError(f"consensus_step={self.consensus_step} has no effect without a codec")
        if self.codec is not None and (reason := self.mixer.why_uncoded):
            raise UsageError(f"mode={self.mode} {reason}; use mode=average, or leave out codec={self.codec}")
        if self.consensus_step != "auto" and not 0 < self.consensus_step <= 1:
            raise UsageError(f"consensus_step must be auto, or above 0 and at most 1, not {self.consensus_step}")

    @property
    def mixer(self) -> type[Mixer]:
        """What exchanges models where nothing is coded."""
        return _MIXERS[self.mode]

    def step_of(self, codec: Codec) -> float:
        """The consensus step, in numbers."""
        if self.consensus_step != "auto":
            return self.consensus_step
        return min(1.0, 2 * codec.part) if codec.sparse else 1.0

    def check(self, *, num_workers: int) -> None:
        topology = self.topology
        try:
            keeps_mean, joins_all = topology.keeps_mean(num_workers), topology.joins_all(num_workers)
            if self.mode == "relay":
                require_tree(topology, num_workers)
            links_change = topology.period(num_workers) > 1
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.codec is not None and links_change:
            raise UsageError(
                f"under {topology} links change, and with codec={self.codec} a worker has to hear every message of "
                "those it mixes with; use a topology whose links stay, such as ring, torus, hypercube or exponential"
            )
        if not joins_all:
            raise UsageError(f"under {topology} some of {num_workers} workers never hear of some others")
        if self.mode in ("average", "outer") and not keeps_mean:
            raise UsageError(f"the weights of {topology} do not keep the mean of all models; use mode=push-sum")
        if self.mode in ("average", "outer") and not topology.comes_together(num_workers):
            raise UsageError(f"under {topology} models never come together: {_why_apart(topology, num_workers)}")

    @property
    def traits(self) -> Traits:
        mixer = self.mixer if self.codec is None else SharedEstimates
        moved = Neighbouring(
            topology=self.topology,
            every=self.every,
            behind_computing=self.order == "awc",
            message_size=mixer.message_size,
            takes_means=self.mode in ("average", "push-sum", "running-sums"),
            codec=of_neighbours(self.codec),
            codec_scope=self.codec_scope,
        )
        return Traits(
            lock_step=False,
            traffic=(moved,),
            workers_differ=True,
            repeats_steps=True,
            own_scores=self.own_scores,
            missing_messages=mixer.missing_messages,
            passes_attacks=True,
        )

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return GossipSynchronizer(self, context, replica)


def _why_apart(topology: Topology, size: int) -> str:
    """What keeps mixing that keeps the mean from taking all to it, and what to do about it."""
    near = [
        (rank, topology.neighbours(step, rank, size)) for step in range(topology.period(size)) for rank in range(size)
    ]
    for rank, each in near:
        for other, weight in each.receives_from.items():
            if weight < 0:
                return f"the link from worker {other} to worker {rank} has the weight {weight:g}; take 0 to 1"
    rank, worst = min(near, key=lambda each: each[1].own_weight)
    kept = round(worst.own_weight, 9)
    if kept < 0:
        return (
            f"the links to worker {rank} weigh {sum(worst.receives_from.values()):g} together, and its own model "
            f"{kept:g}; make them weigh at most 1, or leave all weights out"
        )
    if kept == 0:
        return "workers keep nothing of their own models, and swap them for ever; make the weights of links smaller"
    return "links of weight 0 part them; make their weights larger"
