"""One worker's run as its script sees it: what it asks for, its steps, and its end."""

import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline.attacks import DataAttack, parse
from paceline.checkpoint import Checkpoint
from paceline.config import RunConfig
from paceline.errors import BudgetReached, UsageError
from paceline.interval import Count
from paceline.records import MetricRecord, Reporter, StepRecord
from paceline.roster import Participation
from paceline.seeding import derive, seed_everything
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer
from paceline.strategies.hostility import under_attack
from paceline.strategies.replica import (
    Replica,
    copy_from_first,
    may_evaluate,
    require_joint_changes,
    require_same_tensors,
)
from paceline.strategies.settings import require_same_settings
from paceline.strategies.several import as_one, describe_each, whole_of
from paceline.strategies.together import Together
from paceline.training import snapshot
from paceline.training.accounting import Account
from paceline.training.cadence import NEVER, Cadence
from paceline.training.checkpoints import Checkpoints
from paceline.training.elastic import Survivor
from paceline.training.evaluation import Evaluation
from paceline.training.feeds import Feed, joined, require_even
from paceline.training.given import Given
from paceline.training.handouts import Handouts
from paceline.training.lone_samples import LoneSamples
from paceline.training.pauses import Pauses
from paceline.training.sharding import Part, Place, ShardedLoader
from paceline.training.summed_loss import SummedLoss
from paceline.training.unprepared import UnpreparedSteps
from paceline.training.unstepped import Unstepped
from paceline.training.worker_run import Prepared, WorkerRun

Update = Callable[[], object]
"""The script's own optimizer step."""


@final
class Session:
    """Joins a script's models, optimizers and loaders to a strategy.

    A pause lies between two steps of the script: when it asks for its next batch, or steps again without one. What a
    script does after `optimizer.step()`, such as stepping a scheduler, so belongs to the step before the pause.

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
        self._poisons = [attack for attack in self._attacks if isinstance(attack, DataAttack)]
        context = replace(context, seed=config.seed, max_steps=config.max_steps)
        if self._attacks:
            context = under_attack(self._attacks, context, strategy.traits)
        self.run = WorkerRun(context, strategy, config, reporter)
        self._checkpoint = checkpoint
        traits = strategy.traits
        runs_free = traits.tells_stop and not traits.lock_step
        self._cadence = Cadence(config, num_free_workers=context.size if runs_free else 0)
        self._survivor = None
        if config.elastic is not None and context.reform is not None:
            self._survivor = Survivor(self.run, config.elastic)
            self.run.context = replace(self.run.context, recovery=self._survivor)
        self._checkpoints = Checkpoints(self.run)
        self.pauses = Pauses(self.run, self._cadence, self._checkpoints, self._survivor)
        self._has_started = False
        self._has_finished = False
        self._is_released = False
        self._others_left = False  # a worker's script has ended, and with it the run
        self._is_stepping = False
        self._is_pausing = False
        self._thread = threading.get_ident()
        self._refusal: UsageError | None = None  # of a loader that is read in another thread, for the script's own
        self._summed_loss: SummedLoss | None = None
        self._unrecorded: tuple[int, StepOutcome] | None = None  # a step's samples and outcome, where these come late
        self._unsettled: StepOutcome | None = None  # of a step after which nobody has looked for a pause yet
        seed_everything(config.seed)

    # --- what a script asks for -------------------------------------------------------------------------------

    def prepare(self, given: Given) -> dict[str, ShardedLoader]:
        """Move the models to the device, agree on them among ranks, and take over the optimizers' steps and the data,
        which comes back by name."""
        if self.run.is_prepared:
            raise UsageError("prepare was called twice; give it everything at once, several of a kind by name")
        context, config = self.run.context, self.run.config
        if self._attacks:
            knows = "all" if self.run.strategy.traits.takes_equal_steps else "own"
            self.run.tell("attack", {"attacks": list(config.attacks), "hostile workers know": knows})
        model = as_one(given.models)
        replicas = describe_each(model, given.optimizers)
        whole = whole_of(replicas)
        _move(model, given.optimizers.values(), context.device)
        if context.size > 1:
            require_joint_changes(model)
            require_same_tensors(whole, context.collective)
            for optimizer in given.optimizers.values():
                require_same_settings(optimizer, context.collective)
        if self._checkpoint is not None:
            snapshot.load_model(model, self._checkpoint, num_workers=context.size, seed=config.seed)
        if context.size > 1:
            copy_from_first(model, context.collective)
        if len(given.loaders) > 1 and self.run.strategy.participation() is not None:
            raise UsageError("a client's turn is a pass over its data; prepare one loader")
        loaders = {name: self._sharded(name, index, given) for index, name in enumerate(given.loaders)}
        self.run.context = replace(context, roster=next(iter(loaders.values())).roster)
        context.pacing.watch(whole)
        parts = {name: self._bound(number, replicas[number]) for number, name in enumerate(given.optimizers)}
        first, *others = parts.values()
        first.stop_vote = self.run.wants_stop
        synchronizer = Together(context, whole, parts) if others else first
        self._told: Mapping[str, object] = {}
        self._tell_facts(synchronizer.facts)
        account = Account(self.run.clock, synchronizer.timings)
        handouts_of = partial(
            Handouts,
            whole,
            rank=context.rank,
            set_weight=synchronizer.set_weight,
            is_averaged=context.size > 1 and self.run.traits.averages_gradients,
            is_weighed=context.size > 1 and self.run.traits.is_synchronous,
        )
        feeds = {name: Feed(loader, handouts_of()) for name, loader in loaders.items()}
        handouts = joined([feed.handouts for feed in feeds.values()])
        for number, (name, part) in enumerate(parts.items()):
            part.number, part.title, part.progress = number, name if others else "", handouts.progress
        if self._survivor is not None:
            self._survivor.attach(given, handouts)
        optimizers, names = given.optimizers, given.optimizer_names
        self.run.prepare(Prepared(whole, optimizers, names, synchronizer, feeds, handouts, account, given.extra))
        self._unstepped = Unstepped(replicas[0].parameters, rank=context.rank)
        self._lone_samples = LoneSamples(model, rank=context.rank)
        self._num_samples = 0  # of the batch that was handed out last
        if context.size > 1 and self.run.traits.lock_step:
            self._summed_loss = SummedLoss(
                whole.parameters, rank=context.rank, size=context.size, num_samples=lambda: self._num_samples
            )
        for optimizer, part in zip(optimizers.values(), parts.values(), strict=True):
            if part is first:
                self._take_over(optimizer, part, self._begin_step, self._step)
            else:
                self._take_over(optimizer, part, self._begin_step_beside, partial(self._step_beside, part))
        self._unprepared = UnpreparedSteps(
            model,
            optimizers.values(),
            rank=context.rank,
            may_step=self._may_step_unprepared,
            may_train_others=lambda: context.size == 1 or self._is_pausing,
            num_steps=lambda: handouts.progress().num_steps,
        )
        if self._checkpoint is not None:
            self._checkpoints.restore(self._checkpoint)
            self._cadence.checkpointed_at = self._checkpoint.iteration
            workers = self._checkpoint.workers
            self._cadence.evaluated_at = Count(
                self._checkpoint.iteration,
                sum(worker.samples for worker in workers),
                sum(worker.steps for worker in workers),
                self._checkpoint.time_s,
            )
        seed_everything(derive(config.seed, "rank", context.rank))
        return loaders

    def set_evaluation(self, evaluation: Evaluation) -> None:
        if self.pauses.evaluation is not None:
            raise UsageError("a second evaluation was registered; return all metrics from one function")
        if self._has_started:
            raise UsageError("the evaluation came after the first batch; register it before the training loop")
        self.pauses.evaluation = evaluation

    def log(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Keep what the script says of this step."""
        run = self.run
        now_s = run.clock.now_s
        for name, value in metrics.items():
            number = float(value.detach()) if isinstance(value, Tensor) else float(value)
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
        if self._survivor is not None and self._has_started and not self._has_finished:
            raise UsageError(
                f"{what} in the training loop could not be repeated when a worker dies (--elastic); call it before the "
                "first batch, or leave --elastic out"
            )
        if self._has_started and not self._has_finished and not self.run.traits.lock_step:
            raise UsageError(
                f"{what} in the training loop needs all workers at the same step, which this strategy does not keep; "
                "call it before the first batch"
            )

    def finish(self) -> None:
        """The script is done: wait for the others, evaluate and save. Collective call."""
        if self._has_finished or not self.run.is_prepared:
            return
        self._require_readable()
        self._has_finished = self._is_pausing = True
        if not self._has_started:
            self._start()
        if self.run.context.roster is not None:
            self._end_turn()
            self._settle()
        has_ended = self.run.has_ended
        self.run.clock.pause()
        self._end()
        synchronizer = self.run.prepared.synchronizer
        if self.run.context.roster is None or not has_ended:
            synchronizer.leave()
        self.run.iteration = max(self.run.iteration, synchronizer.iteration)  # leaving may have ended a round
        self._record_late(iteration=self.run.iteration)
        if self.run.context.roster is not None and (self._others_left or not has_ended):
            wanted = self.run.config.max_steps or 0
            if self.run.iteration < wanted:
                self.run.tell("ended_early", {"wanted": wanted, "by": synchronizer.ended_by or "script"})
        while not self._meet(is_done=True):
            pass
        self.release()

    def release(self) -> None:
        """Give back hooks and files, also where the script has failed; the first call does it."""
        if not self._is_released and self.run.is_prepared:
            self._is_released = True
            prepared = self.run.prepared
            with ExitStack() as stack:  # calls all of them, whichever fails
                for part in (self._unprepared, self._lone_samples, self._summed_loss, prepared.handouts):
                    if part is not None:
                        stack.callback(part.close)
                stack.callback(prepared.synchronizer.close)

    # --- steps ------------------------------------------------------------------------------------------------

    def _bound(self, number: int, replica: Replica) -> Synchronizer:
        """The strategy's live half for the optimizer of this number."""
        context = self.run.context
        if number and context.store_beside is not None:
            self.run.strategy.admission_rule_beside(context.membership)  # refuses here, on every worker
            context = replace(context, store=context.store_beside(number))
        if number:
            context = replace(context, max_steps=None)  # iterations are the first one's
        return self.run.strategy.bind(context, replica)

    def _take_over(
        self,
        optimizer: torch.optim.Optimizer,
        synchronizer: Synchronizer,
        begin_step: Callable[[], None],
        take_step: Callable[..., None],
    ) -> None:
        """Replace the optimizer's step on this object alone, so that schedulers and scalers keep hold of it."""
        own_step = optimizer.step
        evaluates = may_evaluate(optimizer)

        def step(this: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss: list[Any] = [None]
            if evaluates and closure is not None:
                evaluate = synchronizer.evaluating(closure)
                synchronizer.gradients_are_spent = self.run.prepared.handouts.are_gradients_spent
                take_step(lambda: loss.append(own_step(evaluate)), is_computed=False)
                synchronizer.gradients_are_spent = False
                return loss[-1]
            if closure is not None:
                begin_step()
                with torch.enable_grad():
                    loss.append(closure())
            take_step(own_step)
            this._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look at
            return loss[-1]

        if hasattr(own_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler made before counts on it
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, update: Update, *, is_computed: bool = True) -> None:
        """One step of the first optimizer, and its record: what of its time was computing, moving tensors, and waiting
        for others.

        `is_computed`: gradients are there, and `update` computes none.

        Right after a backward pass no code is in the caches: every call that this leaves out saves 2 us a step.
        """
        run, prepared = self.run, self.run.prepared
        self._begin_step()
        prepared.handouts.look_back()
        if self._summed_loss is not None and self._summed_loss.has_looked:
            self._summed_loss.close()
            self._summed_loss = None
        if is_computed:
            prepared.handouts.take_what_was_set()
        self._is_stepping = True
        try:
            outcome = prepared.synchronizer.step(update, pause_at=self._cadence.next_pause)
        finally:
            self._is_stepping = False
        if prepared.synchronizer.facts is not self._told:
            self._tell_facts(prepared.synchronizer.facts)
        samples = prepared.handouts.end_step()
        run.steps += 1
        run.samples += samples
        if run.context.roster is None:
            self._record(samples, outcome)
        else:
            self._unrecorded = samples, outcome
        self._take(outcome)
        self._unsettled = outcome

    def _record(self, samples: int, outcome: StepOutcome) -> None:
        """The step is over, and what comes now belongs to the next one."""
        run, prepared = self.run, self.run.prepared
        time_s, compute_s, communication_s, waiting_s, moved_bytes, hidden_s = prepared.account.close_step()
        run.reporter.emit(
            StepRecord(
                run.context.rank,
                run.steps,
                outcome.iteration,
                time_s,
                samples,
                compute_s,
                communication_s,
                waiting_s,
                moved_bytes,
                outcome.staleness,
                hidden_s,
            )
        )

    def _record_late(self, *, iteration: int = 0) -> None:
        """Where a pass is a client's turn, the exchange at its end belongs to its last step, which is known to be the
        last when the script comes for more."""
        if self._unrecorded is not None:
            (samples, outcome), self._unrecorded = self._unrecorded, None
            self._record(samples, outcome._replace(iteration=max(iteration, outcome.iteration)))

    def _tell_facts(self, facts: Mapping[str, object]) -> None:
        """What the strategy has measured or chosen, when it is new."""
        if facts:
            self.run.tell("tuned", facts)
        self._told = facts

    def _step_beside(self, synchronizer: Synchronizer, update: Update, *, is_computed: bool = True) -> None:
        """One step of another optimizer. It belongs to the first one's step before it in its round of the script's
        loop, or to the next one; so also to the last, after which the run has ended already."""
        self._begin_step_beside()
        self._is_stepping = True
        try:
            synchronizer.step(update, pause_at=NEVER)
        finally:
            self._is_stepping = False

    def _begin_step_beside(self) -> None:
        self._require_readable()
        if not self._has_started:
            self._start()

    def _may_step_unprepared(self) -> bool:
        """Whether an optimizer that was not prepared may step: inside one that was, or after training."""
        return self._is_stepping or self.run.has_ended

    def _begin_step(self) -> None:
        self._require_readable()
        if not self._has_started:
            self._start()
        self._record_late()
        if self._unsettled is not None:
            self._settle()
        if self.run.has_ended:
            raise BudgetReached("the run has ended; loop over the prepared loader, which ends with it")

    def _take(self, outcome: StepOutcome) -> None:
        self.run.iteration = outcome.iteration
        self._others_left = self._others_left or outcome.stop
        if outcome.stop or self._cadence.is_over(outcome.iteration):
            self.run.has_ended = True

    def _settle(self) -> None:
        """Between two steps: pause where that is due, and wait for admission where a pause was entered without it."""
        outcome, self._unsettled = self._unsettled, None
        has_met = False
        while outcome is not None and not self.run.has_ended:
            if outcome.meets or outcome.iteration >= self._cadence.next_pause:
                has_met = True
                with self._pausing(), self.run.prepared.account.pause():
                    self._meet(is_done=False)
            if self.run.has_ended or outcome.admitted:
                break
            pause_at = self._cadence.next_pause
            with self._pausing():
                outcome = self.run.prepared.synchronizer.wait_for_admission(pause_at=pause_at)
            self._take(outcome)
        if self.run.has_ended:
            self._end()
        elif outcome is not None and not has_met:  # in a pause the run's iteration has become that of the furthest
            self.pauses.between_steps()

    def _meet(self, *, is_done: bool) -> bool:
        if self._survivor is None:
            return self.pauses.meet(is_done=is_done)
        meet = partial(self.pauses.meet, is_done=is_done)
        return self._survivor.repeated(meet, self.run.prepared.synchronizer)

    def _end(self) -> None:
        self.run.has_ended = True
        self._checkpoints.keep_end()

    def _start(self) -> None:
        """All workers are ready: look at the model once, and start the clock."""
        self._has_started = True
        if self._survivor is not None:
            prepared = self.run.prepared
            self._survivor.require_prepared_schedulers(prepared.extra, next(iter(prepared.optimizers.values())))
        with self._pausing():
            self.run.prepared.synchronizer.start()
            self._meet(is_done=False)
        self.pauses.require_evaluation()
        self.run.tell("training")
        self.run.prepared.account.start()

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """The script waits meanwhile, but for its evaluation."""
        before, self._is_pausing = self._is_pausing, True
        try:
            yield
        finally:
            self._is_pausing = before

    # --- batches ----------------------------------------------------------------------------------------------

    def _sharded(self, name: str, index: int, given: Given) -> ShardedLoader:
        """This worker's part of a loader. The orders of several are drawn apart, as one process would draw them."""
        context, seed = self.run.context, self.run.config.seed
        sharded = ShardedLoader(
            given.loaders[name],
            rank=context.rank,
            size=context.size,
            seed=derive(seed, "data", index) if index else seed,
            on_return=partial(self._on_return, name),
            on_part=partial(self._on_part, name),
            on_position=self._on_position,
            poison=self._poison if self._poisons else None,
            on_pass=self._on_pass,
            on_pass_end=self._on_pass_end,
            should_stop=lambda: self.run.has_ended or self._refusal is not None,
            gather=context.collective.all_gather_object,
            takes_equal_steps=self.run.traits.takes_equal_steps,
            participation=self._participation(),
            dealing=self._survivor.deals if self._survivor is not None else None,
        )
        if len(given.loaders) > 1 and self.run.traits.is_synchronous:
            require_even(name, sharded.is_even)
        return sharded

    def _participation(self) -> Participation | None:
        """Who takes part of those whose turns are played here."""
        found, context = self.run.strategy.participation(), self.run.context
        if found is None:
            return None
        here = found.at_client() if context.server is not None else found
        return here.at_server() if context.clients is not None else here

    def _on_return(self, name: str) -> None:
        if not self._is_elsewhere:
            self.run.prepared.handouts.look_back()
            if not self.run.steps:
                self._unstepped.look(has_trained=self.run.prepared.handouts.has_trained)
            self._settle()
            return
        is_stream = isinstance(self.run.prepared.feeds[name].loader.dataset, IterableDataset)
        if self.run.context.pacing.is_simulated or self._survivor or (is_stream and self.run.traits.takes_equal_steps):
            # Raised in the script's own thread: it may wait for this one, which now only ends its epoch.
            self._refusal = UsageError(
                f"rank {self.run.context.rank} reads the loader in another thread: a virtual run would not repeat "
                "itself, and ranks could not agree on a stream's end, or on what a dead one had done (--elastic); "
                "loop over the loader itself, and give the DataLoader num_workers to read ahead"
            )

    def _poison(self, batch: Any) -> Any:
        sender = self.run.prepared.synchronizer.sender
        size = self.run.traits.num_clients or self.run.context.size
        for attack in self._poisons:
            if attack.is_hostile(sender, size=size):
                batch = attack.of_batch(batch)
        return batch

    def _on_pass(self) -> None:
        """Where a pass over the data is a client's turn: another one begins, and the one before is over, also if the
        script has left it early."""
        run = self.run
        if run.context.roster is None:
            return
        if self._is_elsewhere:
            self._refusal = UsageError(
                f"rank {run.context.rank} reads the loader in another thread, while the script trains on a client's "
                "batches; loop over the loader itself"
            )
            return
        if not self._has_started:
            self._start()
        for feed in run.prepared.feeds.values():
            feed.handouts.end_pass()
        self._record_late(iteration=self._end_turn())
        self._settle()
        if not run.has_ended:
            run.prepared.synchronizer.begin_turn()

    def _on_pass_end(self) -> None:
        if self.run.context.roster is not None and not self._is_elsewhere:
            self._end_turn()

    def _end_turn(self) -> int:
        """The client whose turn it is, if there is one, gives what it has; returns the iteration after that."""
        with self._pausing():
            self._unsettled = outcome = self.run.prepared.synchronizer.end_turn()
        self._take(outcome)
        return outcome.iteration

    def _on_part(self, name: str, part: Part, place: Place) -> None:
        if not self._is_elsewhere and not self._has_started:
            self._start()
        self._record_late()
        if not self.run.traits.is_synchronous:
            part = part._replace(weight=1.0)  # every gradient is an update of its own
        feeds = self.run.prepared.feeds
        if len(feeds) > 1:
            require_even(name, part.weight == 1.0)
        self._lone_samples.expect(name, place, num_samples=part.num_samples)
        self._num_samples = part.num_samples
        feeds[name].handouts.hand_out(part, place, is_elsewhere=self._is_elsewhere)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the caller is a thread that reads the loader for the script, while the script itself may train."""
        return threading.get_ident() != self._thread

    def _require_readable(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _on_position(self) -> None:
        """The script has come to where the checkpoint was taken: a loader has come to its place, of several the
        first."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            prepared = self.run.prepared
            rank = self.run.context.rank
            snapshot.resume_script(checkpoint, rank, prepared.optimizers.values(), prepared.extra)


def _move(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Bring the model to the worker's device in place, so that optimizers keep its parameters, and their state."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                    state[name] = value.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
