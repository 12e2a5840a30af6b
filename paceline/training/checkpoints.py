"""Checkpoints of a run: copied while all workers pause, written beside training, and taken up again when the script
prepares its model."""

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, final

from torch import Tensor, nn

from paceline.checkpoint import FILE_NAME, Checkpoint, WorkerState
from paceline.errors import NotWritten, UsageError
from paceline.records import EventRecord
from paceline.strategies.base import Strategy
from paceline.strategies.own_state import OwnState, carried_over, for_joiners
from paceline.training import feeds, row_tables, snapshot
from paceline.training.beside import Beside
from paceline.training.row_tables import Written
from paceline.training.sharding import Place
from paceline.training.snapshot import Snapshot
from paceline.training.worker_run import WorkerRun

if TYPE_CHECKING:
    from paceline.training.surviving import Surviving

INTERVAL_S = 30.0
"""Training that a killed run may lose, where no other cadence is set."""
_ON_TIME, _EARLY = 0.9, 0.8
"""Shares of that time after which workers pause for one, and after which any pause takes one: steps may grow slower."""
_RARE = 10
"""The next checkpoint comes after so many times what servers took to write their rows: all workers wait meanwhile."""


@final
class Checkpoints:
    """Takes and restores a run's checkpoints."""

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._saved_s = run.context.pacing.now_s()
        self._interval_s = INTERVAL_S
        self._last: Snapshot | None = None
        self._writing = Beside()
        self.survivor: Surviving | None = None
        """Knows where an elastic run is in its data."""

    @property
    def _are_kept(self) -> bool:
        return self._run.reporter.keeps_files and not self._run.goes_on_by

    @property
    def due_in_s(self) -> float:
        """Seconds until a pause should save, if nothing else says when; infinite where the run saves nothing."""
        if not self._are_kept:
            return math.inf
        return _EARLY * self._interval_s - (self._run.context.pacing.now_s() - self._saved_s)

    def next_in_s(self, due_in_s: float, *, has_saved: bool) -> float:
        """Seconds until all workers should pause to save; infinite where something else than time decides.

        Args:
            due_in_s: what rank 0 said in this pause.
            has_saved: this pause took one.
        """
        if self._run.config.checkpoint_every is not None or not self._are_kept:
            return math.inf
        return _ON_TIME * INTERVAL_S if has_saved else max(0.0, due_in_s) + (_ON_TIME - _EARLY) * INTERVAL_S

    def keep_end(self) -> None:
        """The run ends here: keep what a checkpoint is to say of the script, whatever it does afterwards."""
        if self._last is None:
            self._last = copy.deepcopy(self._taken())

    def own_part(self) -> Snapshot:
        """What this worker adds to a checkpoint. Take it before the global model is put in place.

        The strategy's part is as it is now, like the model: leaving may have changed both since the script's end.
        """
        own = self._run.prepared.synchronizer.own_state()
        taken = self._last or self._taken()
        if self.survivor is not None:
            taken = replace(taken, worker=self.survivor.in_pause(taken.worker))
        if self._run.context.roster is not None and not self._run.context.is_first:
            taken = snapshot.with_own_script(taken)  # workers play clients of other sizes, and other numbers of them
        return snapshot.with_own_state(taken, own, is_first=self._run.context.is_first)

    def save(self, model: nn.Module, own: Snapshot, time_s: float, *, metrics: dict[str, float], is_last: bool) -> None:
        """Take one, and have it written: beside training where the reporter can. Nothing where the run keeps none.
        Collective call.

        Args:
            model: the global model.
            metrics: of this model, by which the best is chosen.
            is_last: the run ends here, and waits until it is written.

        Raises:
            UsageError: the script has brought something that a checkpoint cannot hold.
            NotWritten: it is the last one, and nothing else would have the rows that were trained.
        """
        run = self._run
        if not self._are_kept:
            return
        began_s = run.context.pacing.now_s()
        self._writing.wait()  # before the next copy is made: a slow disk is not to cost the memory of two
        workers = snapshot.gather_workers(run.context.collective, own)
        if run.context.is_first:
            try:
                rows = row_tables.write_rows(run)
            except NotWritten as failure:
                if is_last:
                    raise
                self._tell_not_saved(run.iteration, time_s, failure)
            else:
                if rows is not None:
                    self._interval_s = max(INTERVAL_S, _RARE * (run.context.pacing.now_s() - began_s))
                weights = snapshot.weights_of(model)
                checkpoint = self.made(weights, own, workers, time_s, metrics=metrics, rows=rows)
                if is_last or not run.reporter.writes_beside:
                    self._write(checkpoint, must_be=is_last and rows is not None)
                else:
                    checkpoint.require_plain()  # raises here, and not beside training
                    self._writing.begin(partial(self._write, _apart(checkpoint)))
        self._saved_s = run.context.pacing.now_s()

    def close(self) -> None:
        """Wait for the one under way, if there is one."""
        self._writing.wait()

    def _write(self, checkpoint: Checkpoint, *, must_be: bool = False) -> None:
        """Training goes on also where it cannot be written; the one before stays, and the next one is tried. Raises
        NotWritten if it must be written."""
        reporter = self._run.reporter
        try:
            reporter.save(FILE_NAME, checkpoint.encode())
        except NotWritten as failure:
            if must_be or self._run.context.clients is not None or self._run.context.server is not None:
                raise  # others have done with the round, and could not do it again
            self._tell_not_saved(checkpoint.iteration, checkpoint.time_s, failure)
        else:
            saved = {"file": FILE_NAME}
            reporter.emit(EventRecord("checkpoint", "run", checkpoint.iteration, checkpoint.time_s, saved))

    def _tell_not_saved(self, iteration: int, time_s: float, failure: NotWritten) -> None:
        print(
            f"the checkpoint of iteration {iteration} is not saved, and the run goes on: {failure}",
            file=sys.stderr,
            flush=True,
        )
        details = {"file": FILE_NAME, "error": str(failure)}
        self._run.reporter.emit(EventRecord("not_saved", "run", iteration, time_s, details))

    def of_this_worker(self, place: Place) -> Checkpoint:
        """A checkpoint of this worker alone, for those who join it, whose next batch is of this place. Parameters and
        the optimizer's state are its own tensors."""
        state = for_joiners(self._run.prepared.synchronizer.own_state())
        own = snapshot.with_own_state(self._taken(), state, is_first=True)
        worker = replace(own.worker, epoch=place.epoch, num_batches_done=place.num_batches_done, stream=None)
        weights = snapshot.weights_of(self._run.prepared.replica.model, copies=False)
        return self.made(weights, replace(own, extra=copy.deepcopy(own.extra)), [worker], self._run.clock.now_s)

    def of_script(self, place: Place) -> Checkpoint:
        """What servers do not have of this worker, for those who join it, whose next batch is of this place."""
        own = self._taken()
        worker = replace(own.worker, epoch=place.epoch, num_batches_done=0, stream=None)
        return self.made({}, own, [worker], self._run.clock.now_s, optimizer={}, rows=row_tables.NOTHING)

    def made(
        self,
        weights: dict[str, Tensor],
        own: Snapshot,
        workers: list[WorkerState],
        time_s: float,
        *,
        metrics: dict[str, float] | None = None,
        rows: Written | None = None,
        optimizer: dict[str, Tensor] | None = None,
    ) -> Checkpoint:
        """The run as it is, with these weights and workers' states; `own` is this worker's part. It holds all rows
        itself, unless servers have written them, and the optimizer's state as it is, unless one is given."""
        run = self._run
        return Checkpoint(
            iteration=run.iteration,
            time_s=time_s,
            model=weights,
            optimizer=run.prepared.synchronizer.optimizer_state() if optimizer is None else optimizer,
            groups=own.groups,
            workers=workers,
            seed=run.config.seed,
            strategy=_kind(run.strategy),
            extra=own.extra,
            data=feeds.identity_of(run.prepared.feeds),
            looks=feeds.looks_of(run.prepared.feeds),
            optimizers=run.prepared.optimizer_names,
            optimizer_kinds=self._optimizer_kinds,
            metrics=metrics or {},
            rows=row_tables.rows_of(run) if rows is None else {},
            rows_directory="" if rows is None else rows.directory,
            row_files={} if rows is None else rows.files,
        )

    def take_up(self, checkpoint: Checkpoint, mine: WorkerState) -> None:
        """Go on beside the worker that this is of, which trains."""
        snapshot.load_weights(self._run.prepared.replica.model, checkpoint)
        self._go_on(checkpoint, mine, mine.own)

    def take_up_script(self, checkpoint: Checkpoint, place: Place) -> None:
        """Go on from this place beside the worker that this is of, which trains: servers have the model."""
        run, prepared = self._run, self._run.prepared
        mine = replace(checkpoint.workers[0], epoch=place.epoch, num_batches_done=place.num_batches_done)
        self._require_same_optimizers(checkpoint)
        run.iteration = checkpoint.iteration
        run.clock.set(checkpoint.time_s)
        snapshot.load_buffers(prepared.replica.model, mine)
        feeds.resume(prepared.feeds, mine, checkpoint.data)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Set counters, clock, the optimizer's state, what is this worker's own, and the position in the data."""
        run, prepared = self._run, self._run.prepared
        workers = checkpoint.workers
        if self.survivor is not None:
            workers = self.survivor.go_on_from(workers, iteration=checkpoint.iteration)
        elif run.traits.is_synchronous and run.context.roster is None:
            workers = snapshot.beside_the_first(workers)
        mine = workers[run.context.rank]
        wanted = prepared.synchronizer.own_state()
        first = workers[0]
        own = {**{name: tensor for name, tensor in first.own.items() if first.fates[name] == "same"}, **mine.own}
        if checkpoint.strategy != _kind(run.strategy) or len(workers) != run.context.size:
            own, fates = carried_over(_own_states(workers), wanted=wanted, size=run.context.size)
            run.tell("carried_over", fates)
        self._go_on(checkpoint, mine, own)
        feeds.expect(prepared.feeds, checkpoint.looks)

    def _go_on(self, checkpoint: Checkpoint, mine: WorkerState, own: Mapping[str, Tensor]) -> None:
        run, prepared = self._run, self._run.prepared
        self._require_same_optimizers(checkpoint)
        run.iteration, run.steps, run.samples = checkpoint.iteration, mine.steps, mine.samples
        run.clock.set(checkpoint.time_s)
        if prepared.statistics is not None:
            prepared.statistics.restore(rounds=checkpoint.iteration)
        snapshot.load_buffers(prepared.replica.model, mine)
        prepared.synchronizer.restore(checkpoint.optimizer, own, iteration=checkpoint.iteration)
        row_tables.load_rows(run, checkpoint)
        feeds.resume(prepared.feeds, mine, checkpoint.data)

    def _require_same_optimizers(self, checkpoint: Checkpoint) -> None:
        own = self._run.prepared.optimizer_names
        if checkpoint.optimizers != own:
            raise UsageError(
                f"the checkpoint is of {_listed(checkpoint.optimizers)}, this run has {_listed(own)}; prepare the same "
                "optimizers, in the same order"
            )
        kinds = self._optimizer_kinds
        if checkpoint.optimizer_kinds not in ([], kinds):
            raise UsageError(
                f"the checkpoint is of {', '.join(checkpoint.optimizer_kinds)}, and this run trains with "
                f"{', '.join(kinds)}, which cannot go on with its state and rates; prepare the same, or have the "
                "script load model.safetensors and begin anew"
            )

    @property
    def _optimizer_kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self._run.prepared.optimizers.values()]

    def _taken(self) -> Snapshot:
        prepared = self._run.prepared
        taken = snapshot.take(
            prepared.replica.model,
            prepared.optimizers.values(),
            next(iter(prepared.feeds.values())).place,
            prepared.extra,
            steps=self._run.steps,
            samples=self._run.samples,
            beside=feeds.places_beside(prepared.feeds),
        )
        return taken if self.survivor is None else replace(taken, worker=self.survivor.for_later(taken.worker))


def _apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same, of which the script changes nothing any more. The model's and the workers' parts are copies already."""
    return replace(
        checkpoint,
        optimizer={name: tensor.clone() for name, tensor in checkpoint.optimizer.items()},
        groups=copy.deepcopy(checkpoint.groups),
        extra=copy.deepcopy(checkpoint.extra),
    )


def _own_states(workers: Sequence[WorkerState]) -> list[dict[str, OwnState]]:
    return [{name: OwnState(worker.own[name], worker.fates[name]) for name in worker.own} for worker in workers]


def _listed(optimizers: Sequence[str]) -> str:
    return f"the optimizers {', '.join(optimizers)}" if optimizers else "one optimizer"


def _kind(strategy: Strategy) -> str:
    """What kind of strategy it is, for telling whether a checkpoint was taken under another one."""
    return f"{type(strategy).__module__}.{type(strategy).__qualname__}"
