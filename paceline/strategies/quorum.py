"""Asynchronous rounds of local steps: servers step with what the first workers have changed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final, get_args

import torch
from torch import Tensor, nn

from paceline.arrays import is_finite
from paceline.codec import Codec, TensorCodec
from paceline.comm.base import Store, Timing
from paceline.elastic import Done
from paceline.errors import UsageError
from paceline.layout import by_group
from paceline.membership import Membership
from paceline.outer import Nesterov, Outer, mix, take_changes
from paceline.server.admission import AdmissionRule, Quorum
from paceline.server.spec import Push, Reply
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, non_finite, option, require_choice
from paceline.strategies.coding import (
    CODEC_DOC,
    NOTHING_CODED,
    SCOPE_DOC,
    Scope,
    left_of,
    push_coding_of,
    require_of_pushed_changes,
)
from paceline.strategies.finite import checked, step_alone
from paceline.strategies.meeting import furthest
from paceline.strategies.mirror import Mirror
from paceline.strategies.own_state import OUTER, OwnState, of_replica, taken_up
from paceline.strategies.replica import Replica, require_same_parameters, spec_of
from paceline.strategies.traits import Served, Traits

_OPTIMIZER, _LEFT = "optimizer.", "left."


@final
@dataclass(frozen=True, kw_only=True)
class QuorumUpdates(Strategy):
    """Rounds of local steps with the script's own optimizer, over servers that hold the outer one.

    DiLoCo (Douillard et al., 2023) without its barrier, as in Liu et al., "Asynchronous local-SGD training for language
    modeling", 2024, section 2, whose servers step with each worker's change by itself (`quorum=1`). A round ends with
    `quorum` changes, and those that come in the grace after these. A later one counts in the round that is then open,
    as it is: it began from older parameters, and its staleness in the records is of so many rounds.

    Changes count by the samples that they were made from. What a codec leaves out of one is added to the worker's next.
    The inner optimizer's state stays with its worker, and is lost with one that dies; who joins begins with none.

    >>> QuorumUpdates(quorum=3).traits.unit
    'round'
    """

    every: int = option(50, "local steps from a worker's exchange to its next")
    quorum: int = option(1, "workers whose changes make a round; others' count in a later one")
    grace_s: float = option(0.0, "seconds for which a round waits for further changes once it has a quorum")
    outer: Outer = option(Nesterov(), "what the servers step with: average, momentum, nesterov, adam or torch")
    servers: int = option(1, "number of servers, each owning one key range")
    codec: Codec | None = option(None, CODEC_DOC.replace("gradients travel", "the workers' changes travel"))
    codec_scope: Scope = option("links", SCOPE_DOC)

    def validate(self) -> None:
        for name in ("every", "quorum", "servers"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.grace_s < float("inf"):
            raise UsageError(f"grace_s must be a number from 0, not {self.grace_s}")
        if not self.outer.by_torch:
            raise UsageError(f"outer={self.outer} is none of torch's optimizers, which servers build anew; use adam")
        self.outer.require_possible()
        require_choice("codec_scope", self.codec_scope, get_args(Scope))
        require_of_pushed_changes(self.codec, self.codec_scope)

    def check(self, *, num_workers: int) -> None:
        if self.quorum > num_workers:
            raise UsageError(f"quorum={self.quorum} is more than {num_workers} worker(s) ever make")
        if self.quorum == num_workers and self.grace_s:
            raise UsageError(f"grace_s has no effect where a quorum is all {num_workers} worker(s)")

    @property
    def traits(self) -> Traits:
        served = Served(
            quorum=self.quorum,
            grace_s=self.grace_s,
            every=self.every,
            codec=self.codec,
            codec_scope=self.codec_scope,
        )
        return Traits(
            lock_step=False,
            unit="round",
            tells_stop=True,
            num_servers=self.servers,
            outlives_workers=True,
            passes_attacks=True,
            traffic=(served,),
        )

    def admission_rule(self, members: Membership) -> AdmissionRule:
        return Quorum(members, quorum=self.quorum, grace_s=self.grace_s)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        if context.store is None:
            raise UsageError("this world has no servers; start the script with `paceline run --strategy async-diloco`")
        return QuorumSynchronizer(self, context, context.store, replica)


@final
class QuorumSynchronizer(Synchronizer):
    def __init__(self, strategy: QuorumUpdates, context: Context, store: Store, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy, self._store = strategy, store
        layout = by_group([replace(spec, group=0) for spec in replica.specs])
        self._outer = Mirror(store.allocate(layout.num_bytes), context.device)
        self._changed = Mirror(store.allocate(layout.num_bytes), context.device)
        self._shared, self._changes = layout.views(self._outer.local), layout.views(self._changed.local)
        self._local = [parameter.detach() for parameter in replica.parameters]
        mix(self._shared, self._local, alpha=0.0)
        self._outer.to_host()
        outer = spec_of(strategy.outer.optimizer([nn.Parameter(torch.zeros(1))]))
        assert strategy.codec is None or isinstance(strategy.codec, TensorCodec)  # others are refused
        is_of_all = strategy.quorum == context.size
        coding = push_coding_of(strategy.codec, strategy.codec_scope, context, layout, is_weighted=is_of_all)
        self._left = left_of(coding, layout)
        store.attach(layout, outer, self._outer.host, self._changed.host, coding=coding)
        if strategy.codec is not None:
            self.facts = {"codec": str(strategy.codec) if store.is_coded else NOTHING_CODED}
        self._outer_state: dict[str, Tensor] = {}
        self._pause_at = 0
        self._steps = 0
        self._weight, self._weights = 1.0, (0.0, 0)
        self._done: Done | None = None  # of the last step

    def start(self) -> None:
        """Rank 0's parameters are the shared ones, also where the script has loaded them since."""
        mix(self._shared, self._local, alpha=0.0)
        self._outer.to_host()
        self._store.load_state(self._outer_state, iteration=self.iteration)
        self._outer_state = {}
        self.context.collective.barrier()
        self._pull()

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._store.timing, self.context.collective.timing)

    def set_weight(self, weight: float) -> None:
        self._weight = weight

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        nonfinite = self._strategy.nonfinite
        return checked(closure, self.replica, nonfinite, rank=self.context.rank, step=self._steps + 1)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        require_same_parameters(self.replica)
        applies = step_alone(self, update, self._strategy.nonfinite, step=self._steps + 1)
        total, count = self._weights
        self._weights = (total + self._weight, count + 1)
        self._steps += 1
        self._pause_at = pause_at
        self._done = None if self.context.done is None else self.context.done()
        is_over = self._weights[1] == self._strategy.every or self._is_to_leave
        outcome = self._exchange() if is_over else StepOutcome(self.iteration)
        return outcome if applies else outcome._replace(staleness=-1)

    @property
    def owes(self) -> bool:
        """Steps since the last exchange, or what a codec has left out."""
        return self._weights[1] > 0 or any(bool(left.any()) for left in self._left)

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        """Called by one who joins, who begins with what the servers have."""
        return self._take(self._store.wait_for_admission(pause_at=pause_at))

    def meet(self, iteration: int, *, active: Sequence[int]) -> int:
        return furthest(self.context, self._store, iteration)

    def leave(self) -> None:
        """A round that the data ended in counts, too."""
        if self._weights[1]:
            self._exchange()
        self._store.leave()

    def step_aside(self) -> None:
        self._store.step_aside()

    def come_back(self) -> None:
        self._store.come_back()

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """What the servers have, which a worker that is through with its data need not, and the mean of all buffers. At
        the end this worker has its own again, also in the middle of its round."""
        with self._outer.put_back():
            self._pull()
            own = [tensor.clone() for tensor in self._local]
            mix(self._local, self._shared, alpha=0.0)
            try:
                with super().global_model() as model:
                    yield model
            finally:
                mix(self._local, own, alpha=0.0)

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        self.context = context

    def own_state(self) -> dict[str, OwnState]:
        own = {name: state for name, state in of_replica(self.replica).items() if name.startswith(_OPTIMIZER)}
        outer = {f"{OUTER}{name}": OwnState(tensor, "same") for name, tensor in self._store.optimizer_state().items()}
        left = {f"{_LEFT}{index}": OwnState(left, "average") for index, left in enumerate(self._left)}
        return {**own, **outer, **left}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        mine = {name.removeprefix(_OPTIMIZER): own[name] for name in own if name.startswith(_OPTIMIZER)}
        super().restore(mine or state, own, iteration=iteration)
        self._outer_state = taken_up(self._strategy.outer, own, tell=self.context.tell)
        for index, left in enumerate(self._left):
            left.copy_(own.get(f"{_LEFT}{index}", left))

    def _exchange(self) -> StepOutcome:
        """Give what was changed since the last exchange, and go on from what the servers have then."""
        total, count = self._weights
        self._weights = (0.0, 0)
        take_changes(self._shared, self._local, self._changes, weight=1.0)
        self.context.corrupt(self._changes, self._steps)
        self._require_finite()
        self._changed.to_host()
        push = Push(
            pause_at=self._pause_at,
            stop=self.stop_vote(),
            weight=total / count,
            done=self._done,
            is_last=self._is_to_leave,
        )
        return self._take(self._store.exchange(push))

    def _take(self, reply: Reply) -> StepOutcome:
        self._outer.to_device()
        mix(self._local, self._shared, alpha=0.0)
        self.iteration = reply.iteration
        return StepOutcome(reply.iteration, reply.stop, max(reply.staleness), reply.admitted)

    @property
    def _is_to_leave(self) -> bool:
        """Others go on without this worker, which gives what it has by now, and owes nothing then."""
        return self.context.reform is not None and self.context.reform.is_asked_to_leave

    def _require_finite(self) -> None:
        """A change that is not finite is nothing under `skip`. Raises NonFiniteGradient under `raise`."""
        names = zip(self.replica.specs, self._changes, strict=True)
        culprit = next((spec.name for spec, change in names if not is_finite(change)), None)
        if culprit is None or self._strategy.nonfinite == "allow":
            return
        if self._strategy.nonfinite == "raise":
            raise non_finite(rank=self.context.rank, step=self._steps, parameter=culprit)
        for change in self._changes:
            change.zero_()

    def _pull(self) -> None:
        self._store.pull()
        self._outer.to_device()
