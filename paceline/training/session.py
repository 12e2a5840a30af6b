"""One worker's run as its script sees it: what it asks for, and what it is given."""

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import final

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline.attacks import DataAttack, parse
from paceline.checkpoint import Checkpoint
from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.hooks import tell_errors_to
from paceline.interval import Count
from paceline.records import MetricRecord, Reporter
from paceline.seeding import derive, seed_everything
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.hostility import told_of, under_attack
from paceline.strategies.replica import Replica, named_parameters_of
from paceline.strategies.several import as_one, describe_each, whole_of
from paceline.strategies.together import Together
from paceline.training import own_options, row_tables, snapshot
from paceline.training.accounting import Account
from paceline.training.batches import Batches
from paceline.training.cadence import Cadence
from paceline.training.checkpoints import Checkpoints
from paceline.training.course import Course
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.extra_states import NAME, ExtraStates
from paceline.training.feeds import Feed, joined
from paceline.training.given import Given
from paceline.training.handouts import Handouts
from paceline.training.handover import Handover
from paceline.training.pauses import Pauses
from paceline.training.running_statistics import RunningStatistics
from paceline.training.same_gradients import SameGradients
from paceline.training.same_start import begin_alike
from paceline.training.sharding import DIFFERS, ShardedLoader, UnpreparedLoaders
from paceline.training.steps import Steps
from paceline.training.summed_loss import SummedLoss
from paceline.training.survivors import Parts, survivor_of
from paceline.training.unchanged import remembered_values
from paceline.training.unprepared import UnpreparedSteps
from paceline.training.unprepared_tables import UnpreparedTables
from paceline.training.worker_run import Prepared, WorkerRun

_LAST = 8
"""Batches of a pass: a script may have copies of these when the smaller one comes."""


@final
class Session:
    """Joins a script's models, optimizers and loaders to a strategy.

    Args:
        context: this worker's place in the world.
        strategy: what is exchanged.
        config: budget and cadence.
        reporter: where records and files go.
        checkpoint: to go on from, if any.
    """

    def __init__(
        self,
        context: Context,
        strategy: Strategy,
        config: RunConfig,
        reporter: Reporter,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._attacks = parse(config.attacks)
        context = replace(context, seed=config.seed, max_steps=config.max_steps)
        context = replace(context, evaluate=self._found_of, off_the_clock=self._off_the_clock)
        self.run = WorkerRun(context, strategy, config, reporter)
        if self._attacks:
            self.run.context = under_attack(self._attacks, context, self.run.traits)
        self.run.context = replace(self.run.context, tell=self.run.tell, log=self.log)
        self._checkpoint = checkpoint
        traits = self.run.traits
        runs_free = traits.tells_stop and not traits.lock_step
        # Whoever joins later has the same.
        num_workers = context.num_at_start or context.size
        # A client whose server is elsewhere learns only after its checkpoint whether its update has counted.
        self._cadence = Cadence(
            config, num_free_workers=num_workers if runs_free else 0, settles_late=context.server is not None
        )
        self._survivor, connect = survivor_of(self.run)
        self._checkpoints = Checkpoints(self.run)
        self.pauses = Pauses(self.run, self._cadence, self._checkpoints, self._survivor)
        self._checkpoints.survivor = self._survivor
        self.course = Course(self.run, self._cadence, self.pauses, self._checkpoints, self._survivor)
        connect(Parts(self.pauses, self._checkpoints, self.course, on_taken=self._take_up))
        tell_errors_to(self.course.refuse)
        self.handover = Handover(self.run, self.course, self._checkpoints, go_on=self._go_on_from)
        self._put_back: Callable[[], None] | None = None
        self._at_release = ExitStack()
        seed_everything(config.seed)

    def prepare(self, given: Given) -> dict[str, ShardedLoader]:
        """Move the models to the device, agree on them among ranks, and take over the optimizers' steps and the data,
        which comes back by name."""
        if self.run.is_prepared:
            raise UsageError(
                "prepare was called twice; give it everything at once, several of a kind by name; each fold of a "
                "cross-validation takes a run of its own"
            )
        context = self.run.context
        if self._attacks and not self.course.joins:
            self.run.tell("attack", told_of(self.run.config.attacks, context, self.run.traits))
        if len(given.loaders) > 1 and self.run.strategy.participation() is not None:
            raise UsageError("a client's turn is a pass over its data; prepare one loader")
        model = as_one(given.models)
        replicas = describe_each(model, given.optimizers)
        whole = whole_of(replicas)
        may_differ = self._survivor is not None
        begin_alike(self.run, model, whole, given.optimizers.values(), self._checkpoint, may_differ=may_differ)
        row_tables.take_in(self.run, whole, next(iter(given.optimizers.values())))
        batches = Batches(
            self.run,
            self.course,
            model=model,
            parameters=replicas[0].parameters,
            poisons=[attack for attack in self._attacks if isinstance(attack, DataAttack)],
            survivor=self._survivor,
        )
        loaders = {name: batches.sharded(name, given, on_position=self._on_position) for name in given.loaders}
        first_loader = next(iter(loaders.values()))
        self.run.context = replace(context, roster=first_loader.roster, data_samples=_num_samples(first_loader.dataset))
        context.pacing.watch(whole)
        parts = {name: self._bound(number, replicas[number]) for number, name in enumerate(given.optimizers)}
        first, *others = parts.values()
        first.stop_vote = self.run.stop_vote
        synchronizer = Together(context, whole, parts) if others else first
        feeds = {name: self._feed(loader, whole, synchronizer) for name, loader in loaders.items()}
        handouts = joined([feed.handouts for feed in feeds.values()])
        for number, (name, part) in enumerate(parts.items()):
            part.number, part.title, part.progress = number, name if others else "", handouts.progress
        if self._survivor is not None:
            self._survivor.attach(given)
        account = Account(self.run.clock, synchronizer.timings)
        optimizers, names = given.optimizers, given.optimizer_names
        states = ExtraStates(model) if self.run.reporter.keeps_files else None
        extra = {**given.extra, **({NAME: states} if states else {})}
        alike = self._same_gradients(whole, loaders, batches)
        if alike is not None:
            self._at_release.callback(alike.close)
        statistics: RunningStatistics | None = None
        if self.run.traits.trains_apart:
            statistics = RunningStatistics(model, rounds=lambda: synchronizer.iteration)
            self._at_release.callback(statistics.close)
        self.run.prepared = Prepared(
            whole, optimizers, names, synchronizer, feeds, handouts, account, alike, extra, statistics
        )
        looked_at = UnpreparedLoaders(rank=context.rank, size=context.size)
        self._at_release.callback(looked_at.close)
        steps = Steps(self.run, self.course, self._cadence, self._summed_loss(whole, batches), looked_at)
        batches.on_pass = steps.begin_pass
        if alike is not None:
            alike.on_begin = steps.look_again
        steps.tell_facts({} if self.course.joins else synchronizer.facts)  # of the others, one who joins knows nothing
        for optimizer, part in zip(optimizers.values(), parts.values(), strict=True):
            steps.take_over(optimizer, part, is_first=part is first)

        def may_train_others() -> bool:
            return context.size == 1 or self.course.is_pausing

        def num_steps() -> int:
            return handouts.progress().num_steps

        unprepared = UnpreparedSteps(
            model,
            optimizers.values(),
            rank=context.rank,
            may_step=lambda: steps.may_step_unprepared,
            may_train_others=may_train_others,
            num_steps=num_steps,
        )
        tables = UnpreparedTables(
            whole.tables, rank=context.rank, may_train_others=may_train_others, num_steps=num_steps
        )
        for part_of_run in (unprepared, tables, batches, steps, handouts, synchronizer, self._checkpoints):
            self._at_release.callback(part_of_run.close)
        if self._checkpoint is not None:
            self._go_on_from(self._checkpoint)
        seed_everything(derive(self.run.config.seed, "rank", context.rank))
        return loaders

    def leave_saving_to_script(self, how: str) -> None:
        """As `Worker.saves_itself`."""
        run = self.run
        if how == run.goes_on_by:
            return
        if not how or run.goes_on_by:
            said = f"; it was {run.goes_on_by!r} before" if run.goes_on_by else ""
            raise UsageError(f"worker.saves_itself({how!r}): say how the script goes on, and say it once{said}")
        if run.is_prepared:
            raise UsageError("worker.saves_itself came after prepare, which has begun checkpoints; say it before")
        own_options.refuse(
            own_options.CHECKPOINTS,
            run.config,
            is_resumed=self._checkpoint is not None,
            why=f"is for Paceline's checkpoints, and this script has its own; {how}",
        )
        run.goes_on_by = how
        run.tell("saves_itself", {"how": how})

    def set_evaluation(self, evaluation: Evaluation) -> None:
        if self.pauses.evaluation is not None:
            raise UsageError("a second evaluation was registered; return all metrics from one function")
        if self.course.has_started:
            raise UsageError("the evaluation came after the first batch; register it before the training loop")
        self.pauses.evaluation = evaluation

    def _found_of(self, model: nn.Module) -> Mapping[str, float]:
        """Evaluate a model, for strategies that judge models themselves."""
        evaluation = self.pauses.evaluation
        if evaluation is None:
            raise UsageError(
                "this run judges updates by the script's evaluation, and the script registers none: see "
                "@worker.evaluation"
            )
        return evaluate(evaluation, model, target=None).metrics

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Stop the training clock, for strategies in whose steps workers wait for what is not training."""
        run, collective = self.run, self.run.context.collective
        collective.set_deadline(None)
        try:
            with run.prepared.account.pause() if run.clock.is_running else nullcontext():
                yield
        finally:
            collective.set_deadline(run.config.deadline_s)

    def log(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Keep what the script says of this step."""
        run = self.run
        now_s = run.clock.now_s
        for name, value in metrics.items():
            try:
                number = float(value.detach()) if isinstance(value, Tensor) else float(value)
            except (TypeError, ValueError, RuntimeError):
                kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise UsageError(f"worker.log({name}=...) takes a number, not {kind}") from None
            run.reporter.emit(MetricRecord(run.context.rank, run.steps, run.iteration, now_s, name, number))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        synchronizer = self.run.prepared.synchronizer
        before = synchronizer.set_synchronizing(False)
        try:
            yield
        finally:
            synchronizer.set_synchronizing(before)

    def require_same_step(self, what: str) -> None:
        """Raise UsageError for what needs all workers, where they are not at the same step."""
        if self.run.is_evaluating and self.run.context.size > 1:
            raise UsageError(
                f"rank {self.run.context.rank}: {what} in the evaluation, which runs on this rank alone; have all "
                "ranks meet in the training loop: `with worker.meeting(...)`"
            )
        if self._survivor is not None and self._is_training:
            raise UsageError(
                f"{what} in the training loop could not be repeated when a worker dies (--elastic); call it before the "
                "first batch, or leave --elastic out"
            )
        if self._is_training and not self.run.traits.lock_step and not self.course.is_meeting:
            raise UsageError(
                f"{what} in the training loop needs all workers at the same step, which this strategy does not keep; "
                "call it before the first batch, inside `with worker.meeting(...)`, or only where "
                "`worker.strategy.traits.lock_step`"
            )

    def finish(self) -> None:
        """The script is done: wait for the others, evaluate and save. Collective call."""
        if self.run.is_prepared and not self.course.has_finished and not self.course.joins:
            self.course.finish()
            self.release()

    def release(self) -> None:
        """Give back hooks and files, also where the script has failed: all of them, whichever fails. The first call
        does it."""
        self._at_release.close()

    @property
    def _is_training(self) -> bool:
        return self.course.has_started and not self.course.has_finished

    # --- what `prepare` does ----------------------------------------------------------------------------------

    def _bound(self, number: int, replica: Replica) -> Synchronizer:
        """The strategy's live half for the optimizer of this number."""
        context = self.run.context
        if number and context.store_beside is not None:
            self.run.strategy.admission_rule_beside(context.membership)  # refuses here, on every worker
            context = replace(context, store=context.store_beside(number))
        if number:
            context = replace(context, max_steps=None)  # iterations are the first one's
        return self.run.strategy.bind(context, replica)

    def _feed(self, loader: ShardedLoader, whole: Replica, synchronizer: Synchronizer) -> Feed:
        context, traits = self.run.context, self.run.traits
        is_weighed = context.has_peers and traits.is_synchronous
        handouts = Handouts(
            whole,
            rank=context.rank,
            set_weight=synchronizer.set_weight,
            is_averaged=context.has_peers and traits.averages_gradients,
            is_weighed=is_weighed,
            copies_from=max(0, len(loader) - _LAST) if is_weighed and not loader.is_even else math.inf,
        )
        return Feed(loader, handouts)

    def _same_gradients(
        self, whole: Replica, loaders: Mapping[str, ShardedLoader], batches: Batches
    ) -> SameGradients | None:
        context = self.run.context
        is_meant = any(getattr(loader.dataset, DIFFERS, False) for loader in loaders.values())
        if not context.has_peers or not self.run.traits.lock_step or is_meant:
            return None
        return SameGradients(
            whole.parameters,
            prepared=[parameter for _, parameter in named_parameters_of(whole.model)],
            size=context.size,
            is_first=context.is_first,
            # Servers refuse whatever change of weights there is.
            is_off=lambda: self.run.traits.servers_own_model or self.course.is_pausing,
            num_samples=lambda: batches.num_samples,
        )

    def _summed_loss(self, whole: Replica, batches: Batches) -> SummedLoss | None:
        context = self.run.context
        if context.size == 1 or not self.run.traits.lock_step:
            return None
        return SummedLoss(
            whole.parameters, rank=context.rank, size=context.size, num_samples=lambda: batches.num_samples
        )

    # --- going on from a checkpoint ---------------------------------------------------------------------------

    def _go_on_from(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.restore(checkpoint)
        self._put_back = remembered_values(self.run.prepared.replica.model)
        self._cadence.checkpointed_at = checkpoint.iteration
        if self.run.context.server is not None:  # which may have another model by now
            return
        self._cadence.evaluated_at = Count(
            checkpoint.iteration,
            sum(worker.samples for worker in checkpoint.workers),
            sum(worker.steps for worker in checkpoint.workers),
            checkpoint.time_s,
        )

    def _take_up(self, checkpoint: Checkpoint) -> None:
        """This worker has joined others, and goes on from there."""
        self._checkpoint = checkpoint

    def _on_position(self) -> None:
        """The script has come to where the checkpoint was taken: a loader has come to its place, of several the
        first."""
        put_back, self._put_back = self._put_back, None
        if put_back is not None:  # a script that loads weights after prepare does so again, as it does after an epoch
            put_back()
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            prepared = self.run.prepared
            rank, num_workers = self.run.context.rank, len(checkpoint.workers)
            worker = checkpoint.workers[rank] if rank < num_workers else None
            snapshot.resume_script(checkpoint, worker, prepared.optimizers.values(), prepared.extra)
            if self._survivor is not None:
                self.course.catch_up()


def _num_samples(dataset: object) -> int:
    return 0 if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) else len(dataset)
