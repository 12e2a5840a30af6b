"""One worker's way through its run: it starts, goes from step to step, pauses between two of them, and ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import final

from paceline.comm.rank_errors import is_of_calls
from paceline.errors import BudgetReached, CallMismatch, NonFiniteGradient, PacelineError, PeerLost, UsageError
from paceline.strategies.base import StepOutcome
from paceline.training.cadence import Cadence
from paceline.training.checkpoints import Checkpoints
from paceline.training.pauses import Pauses
from paceline.training.surviving import Surviving
from paceline.training.worker_run import WorkerRun


@final
class Course:
    """Decides what happens between two steps of the script.

    A pause lies there: when the script asks for its next batch, or steps again without one. What a script does after
    `optimizer.step()`, such as stepping a scheduler, so belongs to the step before the pause.

    Args:
        survivor: repeats what a death has broken off, and joins or leaves the others, in an elastic run.
    """

    def __init__(
        self, run: WorkerRun, cadence: Cadence, pauses: Pauses, checkpoints: Checkpoints, survivor: Surviving | None
    ) -> None:
        self._run, self._cadence, self._pauses = run, cadence, pauses
        self._checkpoints, self._survivor = checkpoints, survivor
        self.has_started = False
        self.has_finished = False
        self.joins = run.context.reform is not None and run.context.reform.joins
        """This worker has come while others train, and takes no part yet."""
        self.is_pausing = False
        """The script waits, but for its evaluation."""
        self.is_meeting = False
        """All workers are at one place of their scripts."""
        self.has_global_model = False
        """It is in the place of this worker's own."""
        self._others_left = False  # a worker's script has ended, and with it the run
        self.refusal: PacelineError | None = None
        """What the script's own thread is to be told, as `refuse` says."""
        self._unrecorded: tuple[int, StepOutcome] | None = None  # a step's samples and outcome, where these come late
        self.unsettled: StepOutcome | None = None
        """Of the last step, if something may be due before the next one and nobody has looked yet; else none."""
        self._looks_always = survivor is not None or run.traits.shows_model

    def is_over(self) -> bool:
        """No further batch is to be given."""
        return self._run.has_ended or self.refusal is not None

    def refuse(self, error: PacelineError) -> None:
        """Raise the error in the script's own thread, at its next step or its end: it was raised in another thread, or
        where the script may have caught it. The first one counts. A gradient that is not finite is for the script to
        catch: all workers see it."""
        if self.refusal is None and not isinstance(error, BudgetReached | NonFiniteGradient):
            self.refusal = error

    def require_allowed(self) -> None:
        """Raises the error of `refuse`."""
        if self.refusal is not None:
            raise self.refusal

    def placed(self, error: CallMismatch) -> CallMismatch:
        """The same, with the place in this worker's script where it met others that are elsewhere."""
        progress = self._run.prepared.handouts.progress()
        place = f"in step {progress.num_steps + 1}, on batch {progress.num_batches}"
        return CallMismatch(f"rank {self._run.context.rank}, {place}: {error}")

    # --- steps ------------------------------------------------------------------------------------------------

    def start_once(self) -> None:
        """All workers are ready: look at the model once, and start the clock."""
        if self.has_started:
            return
        if self.joins:
            raise UsageError("a worker that joins begins with a batch: loop over the prepared loader (--elastic)")
        self.has_started = True
        prepared = self._run.prepared
        if self._survivor is not None:
            self._survivor.require_prepared_schedulers(prepared.extra, next(iter(prepared.optimizers.values())))
        with self._pausing():
            prepared.synchronizer.start()
            self._meet(is_done=False)
        self._pauses.require_evaluation()
        self._run.tell("training")
        prepared.account.start()

    def begin_step(self) -> None:
        """The script steps the first optimizer.

        Raises:
            BudgetReached: after the end of the run.
            UsageError: the error of `refuse`; or the step would be undone.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.has_global_model:
            raise UsageError(
                "optimizer.step() inside of worker.global_model(), at whose end each worker has its own model again, "
                "without that step; step before or after it"
            )
        if not self.has_started:
            self.start_once()
        if self._unrecorded is not None:
            self.record_late()
        if self.unsettled is not None:
            self.settle()
        if self._run.has_ended:
            raise BudgetReached("the run has ended; loop over the prepared loader, which ends with it")

    def end_step(self, samples: int, outcome: StepOutcome) -> None:
        """The first optimizer's step is over."""
        run = self._run
        iteration, stop, staleness, admitted, meets = outcome
        if run.context.roster is None:
            run.reporter.emit(
                run.prepared.account.close_step(run.context.rank, run.steps, iteration, samples, staleness)
            )
        else:
            self._unrecorded = samples, outcome
        pauses = iteration >= self._cadence.next_pause  # which is the end, if not before
        if pauses or stop:
            self._take(outcome)
        else:
            run.iteration = iteration
        if pauses:
            self._pauses.note_settings()
        # Where nothing is due, nothing is settled, which saves a call a step.
        if pauses or stop or meets or not admitted or self._looks_always:
            self.unsettled = outcome

    def settle(self, *, waits: bool = True) -> None:
        """Between two steps: pause where that is due, and wait for admission where a pause was entered without it.

        Args:
            waits: whether to; a client's turn that begins does so, too.
        """
        outcome, self.unsettled = self.unsettled, None
        has_met = False
        while outcome is not None and not self._run.has_ended:
            if outcome.meets or outcome.iteration >= self._cadence.next_pause:
                has_met = True
                with self._pausing(), self._run.prepared.account.pause():
                    self._meet(is_done=False)
            if self._run.has_ended or outcome.admitted or not waits:
                break
            if self._run.context.roster is not None and not self.has_finished:  # its script may have no turn for long
                self.come_or_leave()
            pause_at = self._cadence.next_pause
            with self._pausing():
                outcome = self._run.prepared.synchronizer.wait_for_admission(pause_at=pause_at)
            self._take(outcome)
        if self._run.has_ended:
            self._end()
        elif self._run.traits.shows_model and outcome is not None and not has_met:
            # In a pause the run's iteration has become that of the furthest.
            self._pauses.between_steps()

    @contextmanager
    def meeting(self, place: str) -> Iterator[None]:
        """Inside, all workers' scripts are between two steps at this place, which each comes to as often, and off the
        training clock. Until all are there, those who wait take part in the pauses of the others. Collective call.

        Raises:
            UsageError: a worker does not come to the place any more, this one evaluates by itself, or a round is under
                way, in an elastic run or of clients.
        """
        if self.is_meeting or not self.has_started or self.has_finished:
            yield  # they are together
            return
        if self.is_pausing:
            raise UsageError(f"{place}: an evaluation runs on one worker alone, which cannot meet the others in it")
        self.require_allowed()
        if self._run.context.roster is not None:
            self._end_round(place)
        self.settle(waits=self._run.context.roster is None)
        if self._survivor is not None:
            self._survivor.require_between_rounds(place)
        with self._pausing(), self._run.prepared.account.pause():
            self._wait_for_all(place)
            collective = self._run.context.collective
            collective.set_deadline(None)  # one may evaluate or save for all for as long as it takes
            self.is_meeting = True
            try:
                yield
                collective.barrier()
            finally:
                self.is_meeting = False
                collective.set_deadline(self._run.config.deadline_s)

    def _wait_for_all(self, place: str) -> None:
        """Until every worker waits at this place of its script. Servers that take first comers do not wait for one that
        is there, and all have come back before one of them steps."""
        if self._run.traits.lock_step:
            return
        synchronizer, steps_aside = self._run.prepared.synchronizer, self._run.traits.takes_first_comers
        if steps_aside:
            synchronizer.step_aside()
        while not self._meet(is_done=False, waits_at=place):
            pass
        if steps_aside:
            synchronizer.come_back()

    def come_or_leave(self) -> None:
        """The script asks for a batch: take part from there on in a run that trains already, or no longer, if this
        worker has been asked to leave.

        Raises:
            BudgetReached: it leaves; or the run that it would join has ended.
        """
        if self._survivor is None:
            return
        if self.joins:
            if self._survivor.enters():
                self.joins, self.has_started = False, True
                self._run.prepared.account.start()
                if self._run.traits.has_lanes:  # the exchange says when it goes on, and where the run is
                    self.unsettled = StepOutcome(self._run.iteration, admitted=False)
        elif self._survivor.leaves():
            self.has_finished = self._run.has_ended = True
            raise BudgetReached("this worker leaves the run")

    def catch_up(self) -> bool:
        """All workers may have ended a round between two steps of this one's script, or it has just come. Returns
        whether the run goes on."""
        run, iteration = self._run, self._run.prepared.synchronizer.iteration
        if iteration > run.iteration:
            # Who has just joined still waits for admission: a gradient without it would not count.
            outcome = StepOutcome(iteration) if self.unsettled is None else self.unsettled._replace(iteration=iteration)
            self.unsettled = outcome
            self._take(outcome)
        if self.unsettled is not None:
            self.settle()
        return not run.has_ended

    def end_pass(self) -> bool:
        """All batches of a pass are dealt out, and the round that is under way ends with them. Returns whether the run
        goes on."""
        with self._pausing():
            self._run.prepared.synchronizer.end_round()
        return self.catch_up()

    def record_late(self, *, iteration: int = 0) -> None:
        """Where a pass is a client's turn, the exchange at its end belongs to its last step, which is known to be the
        last when the script comes for more."""
        if self._unrecorded is not None:
            (samples, outcome), self._unrecorded = self._unrecorded, None
            if iteration > outcome.iteration:
                outcome = outcome._replace(iteration=iteration)
            self._record(samples, outcome)

    # --- a client's turns -------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Another client's turn begins; the one before is over, also if the script has left it early."""
        self.record_late(iteration=self.end_turn())
        self.settle()
        if self._run.has_ended:
            return
        if self._survivor is not None:  # the model is the server's
            self._survivor.give(next(iter(self._run.prepared.feeds.values())).place)
        self._run.prepared.synchronizer.begin_turn()

    def end_turn(self) -> int:
        """The client whose turn it is, if there is one, gives what it has; returns the iteration after that."""
        with self._pausing():
            self.unsettled = outcome = self._run.prepared.synchronizer.end_turn()
        self._take(outcome)
        return outcome.iteration

    def _end_round(self, place: str) -> None:
        """The client's turn that is under way is over, and with it the round."""
        if self._survivor is not None:
            self._survivor.require_between_rounds(place)
        self.record_late(iteration=self.end_turn())
        self._run.prepared.synchronizer.require_between_rounds(place)

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The script is done: wait for the others, evaluate and save. Collective call.

        Raises:
            UsageError: the error of `refuse`; or others go on with steps, or with other calls.
        """
        try:
            self._finish()
        except (CallMismatch, PeerLost) as error:
            if not is_of_calls(error):
                raise
            progress = self._run.prepared.handouts.progress()
            raise UsageError(
                f"the script of rank {self._run.context.rank} has ended after {progress.num_steps} steps on "
                f"{progress.num_batches} batches, and that of another rank has not: {error}"
            ) from error

    def _finish(self) -> None:
        self.require_allowed()
        self.has_finished = self.is_pausing = True
        self.start_once()
        run, synchronizer = self._run, self._run.prepared.synchronizer
        has_turns = run.context.roster is not None
        if has_turns:
            self.end_turn()
            self.settle()
        has_ended = run.has_ended
        with run.prepared.account.pause():  # the others may have many steps to go
            self._end()
            if not has_turns or not has_ended:
                synchronizer.leave()
        run.clock.pause()
        run.iteration = max(run.iteration, synchronizer.iteration)  # leaving may have ended a round
        self.record_late(iteration=run.iteration)
        if has_turns and (self._others_left or not has_ended):
            wanted = run.config.max_steps or 0
            if run.iteration < wanted:
                run.tell("ended_early", {"wanted": wanted, "by": synchronizer.ended_by or "script"})
        elif (
            not has_turns
            and run.iteration < 2
            and run.context.has_peers
            and run.traits.unit == "round"
            and run.traits.takes_equal_steps
        ):
            run.tell("one_round", {"steps": run.steps})
        while not self._meet(is_done=True):
            pass

    def _record(self, samples: int, outcome: StepOutcome) -> None:
        """The step is over, and what comes now belongs to the next one."""
        run = self._run
        account, iteration, staleness = run.prepared.account, outcome.iteration, outcome.staleness
        run.reporter.emit(account.close_step(run.context.rank, run.steps, iteration, samples, staleness))

    def _take(self, outcome: StepOutcome) -> None:
        self._run.iteration = outcome.iteration
        self._others_left = self._others_left or outcome.stop
        if outcome.stop or outcome.iteration >= self._cadence.end:
            self._run.has_ended = True

    def _meet(self, *, is_done: bool, waits_at: str = "") -> bool:
        meet = partial(self._pauses.meet, is_done=is_done, waits_at=waits_at)
        if self._survivor is not None:
            return self._survivor.repeated(meet, self._pauses.part, self._run.prepared.synchronizer)
        result = meet()
        self._pauses.part()
        return result

    def _end(self) -> None:
        self._run.has_ended = True
        self._checkpoints.keep_end()

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        before, self.is_pausing = self.is_pausing, True
        try:
            yield
        finally:
            self.is_pausing = before
