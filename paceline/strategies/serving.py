"""One worker's half of the parameter servers: gradients go to the servers, parameters come back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn

from paceline.aggregate import MEAN, Aggregator
from paceline.buckets import GradientBuckets
from paceline.codec import TensorCodec
from paceline.comm.base import Store, Timing
from paceline.errors import UsageError
from paceline.hooks import place_in_script
from paceline.layout import ALIGNMENT_BYTES, by_group
from paceline.server.spec import Push, Reply
from paceline.server.tables.kept_rows import Keeping
from paceline.strategies.base import Context, NonFinitePolicy, StepOutcome, Synchronizer, non_finite
from paceline.strategies.coding import NOTHING_CODED, Scope, left_of, push_coding_of
from paceline.strategies.combining import Combining, Mode, obstacle_to_a_mean
from paceline.strategies.finite import nonfinite_row
from paceline.strategies.held_state import HeldState
from paceline.strategies.looks import next_look
from paceline.strategies.meeting import furthest
from paceline.strategies.mirror import Mirror
from paceline.strategies.own_state import OwnState
from paceline.strategies.pass_ends import Passes
from paceline.strategies.replica import (
    Replica,
    cannot_evaluate,
    hyperparameters,
    is_skipped_by_scaler,
    own_attributes,
    require_all_parameters,
    require_no_hooks,
    require_same_attributes,
)
from paceline.strategies.same_steps import require_same_steps
from paceline.strategies.served_rows import ServedRows
from paceline.strategies.served_weights import ServedState, ServedWeight
from paceline.strategies.server_owned import ServerOwned
from paceline.strategies.sparse_gradients import SparseGradients


@final
class ServerSynchronizer(Synchronizer):
    """Pushes every step's gradients and takes the parameters that the servers answer with.

    Args:
        store: the servers.
        nonfinite: what to do with a gradient that is not finite.
        is_weighted: an update is a mean, in which each gradient counts by its share of the global batch.
        combine: whether workers average gradients among themselves before the script sees them.
        is_partial: not every worker's gradient counts.
        aggregator: of the servers.
        codec: of what is pushed.
        codec_scope: whether servers on this worker's host get it coded, too.
        keeping: of rows of tables.
    """

    def __init__(
        self,
        context: Context,
        store: Store,
        replica: Replica,
        *,
        nonfinite: NonFinitePolicy,
        is_weighted: bool,
        combine: Mode,
        is_partial: bool,
        aggregator: Aggregator = MEAN,
        codec: TensorCodec | None = None,
        codec_scope: Scope = "links",
        keeping: Keeping | None = None,
    ) -> None:
        super().__init__(context, replica)
        self._store, self._nonfinite, self._is_weighted = store, nonfinite, is_weighted and aggregator.streams
        layout, spec = by_group(replica.moved_specs), replica.optimizer_spec
        num_bytes = max(layout.num_bytes, ALIGNMENT_BYTES)  # all may move by rows
        self._parameters = Mirror(store.allocate(num_bytes), context.device)
        self._gradients = Mirror(store.allocate(num_bytes), context.device)
        self._owned = ServerOwned(replica, layout, self._parameters)
        self._buckets = GradientBuckets(
            replica.parameters,
            layout,
            self._gradients.local,
            apart=replica.by_rows,
            on_backward_end=self._finish_backward,
        )
        self._flats = [bucket.flat for bucket in self._buckets.buckets if bucket.flat.numel()]
        self._sparse = SparseGradients(replica, whose=lambda: (self.number, self.title))
        self._combining = Combining(
            context.collective,
            self._flats,
            rows=self._sparse,
            mode=combine,
            parameters=replica.parameters,
            obstacle=obstacle_to_a_mean(is_partial=is_partial, aggregator=aggregator, is_coded=codec is not None),
            find_nonfinite=self._find_nonfinite,
            before_leaving=self._corrupt,
            tell=context.tell or (lambda event, details: None),
        )
        weights = [ServedWeight(replica, index) for index in sorted(replica.by_rows)]
        self._state = ServedState(store, weights)
        self._held = HeldState(self._state, replica, context.collective)
        self._steps = 0
        self._looks_at = 1  # the step before which is looked at what the script may have changed
        self._compares = False  # what this step pushes with the other workers', if all are to push the same
        self._is_joint = (is_weighted or context.size == 1) and not is_partial
        self._has_left = False  # the script takes no further steps
        self._is_left_to_script = False  # the servers' parameters are no longer written here
        self._compares_gradients = not aggregator.streams
        self._stands_in = False  # this batch is another's, and counts nothing
        self._weight = 1.0
        self._groups = hyperparameters(replica.optimizer)
        self._attributes = own_attributes(replica.optimizer)
        self._parameters.to_host()
        coding = push_coding_of(codec, codec_scope, context, layout, is_weighted=self._is_weighted and not is_partial)
        self._left, self._is_coded = left_of(coding, layout), coding is not None
        store.attach(
            layout,
            # What compares whole gradients needs them in one shard, as if the optimizer did.
            replace(spec, element_wise=spec.element_wise and aggregator.is_coordinate_wise),
            self._parameters.host,
            self._gradients.host,
            coding=coding,
            holds_rows=bool(replica.tables or weights),
        )
        if is_weighted and not is_partial and context.reform is None:
            store.expect_alike()
        self._rows = ServedRows(context, store, replica.tables, keeping=keeping, weights=weights)
        if codec is not None:
            self.facts = {"codec": str(codec) if store.is_coded else NOTHING_CODED}

    def start(self) -> None:
        self._parameters.to_host()
        self._held.hand_over(iteration=self.iteration)

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._store.timing, self.context.collective.timing)

    def set_weight(self, weight: float) -> None:
        if self.context.rounds is not None:
            self._stands_in, self._weight = not weight, weight or 1.0
            return
        if self._is_weighted and weight != self._weight:
            self._combining.rescale(self._weight / weight)
            for table in self.replica.tables:
                table.rescale_gradients(self._weight / weight)
        self._weight = weight

    def set_synchronizing(self, on: bool) -> bool:
        if not on:
            self._combining.only_accumulates()
        before, self._buckets.is_synchronizing = self._buckets.is_synchronizing, on
        return before

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        raise cannot_evaluate(self.replica.optimizer)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        self._steps += 1
        self._combining.script_is_done()
        optimizer = self.replica.optimizer
        if self._steps == self._looks_at:
            self._looks_at = next_look(self._steps)
            self._require_as_prepared()
            self._owned.require_in_place(rank=self.context.rank, step=self._steps)
        self._owned.require_untouched(rank=self.context.rank, step=self._steps)
        if self._is_weighted:
            self.require_joint_step()
        self._require_gradients()
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler around step() of fused optimizers
        self._combining.before_step(self._weight, step=self._steps, is_scaled=scale is not None)
        if scale is not None:
            for flat in self._flats:
                flat.div_(scale)
            self._sparse.rescale(1 / float(scale))
        is_void = is_skipped_by_scaler(optimizer) or self._is_nonfinite()
        is_combined = self._combining.take()
        weight = 1.0 if is_combined else self._weight
        if not is_combined:
            self._corrupt()
        if self._compares and self._is_joint and self.context.size > 1:
            require_same_steps(
                self.context.collective,
                self.replica,
                self._buckets,
                are_gradients_alike=is_combined and self.context.hostility is None,
                step=self._steps,
            )
        self._gradients.to_host()
        stop, groups = self.stop_vote(), self._changed_groups()
        self._rows.push(weight=self._weight, is_void=is_void, are_finite=self._nonfinite != "allow")
        done = None if self.context.done is None else self.context.done()
        rounds = self.context.rounds
        share = None if rounds is None else rounds.share()
        push = Push(
            pause_at=pause_at,
            void=is_void or (self._stands_in and not self._compares_gradients),
            stop=stop,
            groups=groups,
            weight=weight,
            done=done,
            share=share,
            is_last=self._is_to_leave,
        )
        reply = self._store.exchange(push)
        outcome = self._take(reply)
        if rounds is not None:
            self.has_updated = rounds.ended(reply.took[-1].workers)
        if self._is_coded:
            for segment, bucket in zip(self._buckets.layout.segments, self._buckets.buckets, strict=True):
                segment.zero_padding(bucket.flat)
        looks_closely = self._steps == 1 or outcome.iteration >= pause_at
        if looks_closely:
            self._looks_at = self._steps + 1
            self._combining.look_closely()
        self._combining.looks = self._looks_at == self._steps + 1
        if self._combining.looks:
            self._owned.untouched.accept_values(looks_closely=looks_closely)
        self._compares = looks_closely
        return outcome

    @property
    def passes(self) -> Passes:
        return Passes(self._buckets, self.replica.is_of_rows, lambda: self._combining.averages)

    @property
    def owes(self) -> bool:
        return any(bool(left.any()) for left in self._left)

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        reply = self._store.wait_for_admission(pause_at=pause_at)
        outcome = self._take(reply)
        self._owned.untouched.accept_values()
        if self.context.rounds is not None and reply.admitted:
            self.context.rounds.admitted(clock=reply.clock, took=reply.took)
            # What its schedulers set counts from its next change on: others may have gone on since it was given that.
            self._groups = hyperparameters(self.replica.optimizer)
        return outcome

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The servers' parameters. At the end this worker has its own again, which may be older: nobody has looked.

        Raises:
            UsageError: the script has changed them since its last step, which would be undone here.
        """
        if not self._has_left:
            self._owned.require_untouched(rank=self.context.rank, step=self._steps + 1)
        is_training = self._looks and not self._has_left
        with ExitStack() as until_then:
            # Also where a worker dies in it, so that those who are left begin anew.
            until_then.callback(self._owned.untouched.accept, looks_closely=True)
            if is_training:
                until_then.enter_context(self._parameters.put_back())
                until_then.enter_context(self._rows.put_back())
            self._refresh(looks=is_training)
            try:
                own = self._rows.put_back() if self._looks and not is_training else nullcontext()
                with own, super().global_model() as model:
                    yield model
            finally:
                if not is_training:
                    self._refresh(looks=False)  # an evaluation may have swapped in others

    def meet(self, iteration: int, *, active: Sequence[int]) -> int:
        return furthest(self.context, self._store, iteration)

    def leave(self) -> None:
        """From here on the parameters are the script's, where all workers have the servers' by now: what it makes of
        them is in the run's model. Elsewhere others may still train, and it is told that this is not in it."""
        self._require_as_prepared()
        self._has_left, self._is_left_to_script = True, self._is_joint
        changed = None if self._is_joint or not self.context.is_first else self._owned.changed()
        if changed is not None:
            place_in_script().warn(
                f"after its last step the script changed parameter {changed!r} on rank {self.context.rank}; the run's "
                "model is the servers', without that: save what you have changed yourself, or use ps-bsp or all-reduce"
            )
        self.context.collective.be_through()
        self._store.leave()
        self._rows.leave()

    def step_aside(self) -> None:
        self._store.step_aside()

    def come_back(self) -> None:
        """With the parameters that the others have, or its next gradient would come too late."""
        self._store.come_back()
        self._take(self._store.wait_for_admission(pause_at=self.iteration))
        self._owned.untouched.accept_values()

    def optimizer_state(self) -> dict[str, Tensor]:
        return self._state.optimizer_state()

    def own_state(self) -> dict[str, OwnState]:
        return {f"push.{index}.left": OwnState(left, "average") for index, left in enumerate(self._left)}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        for index, left in enumerate(self._left):
            left.copy_(own.get(f"push.{index}.left", left))
        self._parameters.to_host()
        self._state.load_state(state, iteration=iteration)
        self._held.drop()
        # A script may load the weights itself, after it has prepared the model.
        self._owned.untouched.accept(looks_closely=True)
        self.iteration = iteration

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        self.context = context

    def enter(self) -> None:
        """What the servers have counts, and comes with the first admission."""
        self._held.take_up()
        self._owned.untouched.accept(looks_closely=True)

    def close(self) -> None:
        self._combining.script_is_done()
        self._buckets.close()
        self._held.close()

    @property
    def _looks(self) -> bool:
        """The first worker's model is looked at; the others take the parameters with their next answer."""
        return self.context.is_first and not self._is_left_to_script

    @property
    def _is_to_leave(self) -> bool:
        """Others go on without this worker, to whom it is to owe nothing."""
        reform = self.context.reform
        return reform is not None and bool(self._left) and reform.is_asked_to_leave

    def _refresh(self, *, looks: bool) -> None:
        if self._looks:
            self._store.pull()
            self._parameters.to_device()
            self._rows.refresh(looks=looks)

    def _take(self, reply: Reply) -> StepOutcome:
        self._parameters.to_device()
        self._rows.refresh()
        self.iteration = reply.iteration
        return StepOutcome(reply.iteration, reply.stop, max(reply.staleness), reply.admitted)

    def _require_as_prepared(self) -> None:
        """Raises UsageError if the script has replaced what it prepared."""
        optimizer = self.replica.optimizer
        require_all_parameters(self.replica)
        require_no_hooks(optimizer)
        require_same_attributes(optimizer, self._attributes)
        self._held.require_untouched()

    def _finish_backward(self) -> None:
        self._combining.after_backward(self._weight)

    def _corrupt(self) -> None:
        """What a hostile worker sends becomes what its attack makes of it; without samples it sends nothing."""
        if not self._stands_in:
            self.context.corrupt(self._buckets.views, self._steps)

    def _changed_groups(self) -> tuple[Mapping[str, object], ...] | None:
        """The groups' hyperparameters, if they are others than at the last push."""
        before, self._groups = self._groups, hyperparameters(self.replica.optimizer)
        return None if self._groups == before else self._groups

    def _require_gradients(self) -> None:
        name = self._buckets.find_unused()
        if name is not None:
            raise UsageError(
                f"step {self._steps}: parameter {name!r} has no gradient on rank {self.context.rank}, and "
                "servers update every parameter at every step; freeze it with requires_grad_(False) before prepare, "
                "or use all-reduce"
            )

    def _find_nonfinite(self) -> str | None:
        return self._buckets.find_any_nonfinite() or self._sparse.find_nonfinite()

    def _is_nonfinite(self) -> bool:
        """Raises NonFiniteGradient if a gradient is not finite and the option says so."""
        if self._nonfinite == "allow":
            return False
        own, self._combining.culprit = self._combining.culprit, None
        own = own or nonfinite_row(self.replica.tables)
        culprit = own or self._find_nonfinite()
        if culprit is not None and self._nonfinite == "raise":
            # What was finite here before the average became so by another rank's gradient.
            named = own if self._combining.is_combined else culprit
            raise non_finite(rank=self.context.rank, step=self._steps, parameter=named)
        return culprit is not None
