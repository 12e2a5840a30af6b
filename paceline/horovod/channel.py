"""One process set's operations under way: who drives them, and when ranks say what is new."""

import itertools
import math
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

from paceline.comm.base import Collective
from paceline.errors import PacelineError
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.execution import Batch, Executor
from paceline.horovod.ledger import Ledger
from paceline.horovod.negotiation import Negotiator, News
from paceline.horovod.operation import Operation
from paceline.horovod.requests import Request
from paceline.horovod.rooms import Room
from paceline.horovod.settings import Settings
from paceline.horovod.timeline import Timeline

_LEAVE_WITHIN_S = 5.0
_CYCLE_S, _CROWDED_S = 1e-3, 0.1
_LONGEST_CYCLES, _MOST_LOOKS = 8, 20
"""Looks at whether a script still asks are this far apart at last; each takes the interpreter from it."""


class _Pace(NamedTuple):
    """When the channel's thread takes up operations that nobody waits for."""

    look_s: float
    """The thread waits so long between two looks, and begins a round if nothing more was asked for meanwhile."""
    longest_s: float
    """This wait doubles from look to look, up to here."""
    enough_bytes: float
    """The thread begins a round once so many wait, though the script still asks for more."""

    @classmethod
    def of(cls, cycle_s: float | None, *, is_crowded: bool) -> "_Pace":
        # Without an idle core nothing is hidden behind backward: seventeen rounds in that of a ResNet-18 took 25 ms of
        # a core a step, and one at its end takes 6.
        if cycle_s is None and is_crowded:
            return cls(_CROWDED_S, _CROWDED_S, math.inf)
        cycle_s = _CYCLE_S if cycle_s is None else cycle_s
        return cls(cycle_s, _LONGEST_CYCLES * cycle_s, 2**20)


@final
class Channel:
    """The operations of one process set on one of its ranks.

    Ranks meet in rounds. A rank takes part in the next one while it waits for an operation, so that nobody turns in
    circles: who has asked for nothing is waited for. Rounds are driven by whoever waits in `wait`. A thread of the
    channel's own drives them when nothing more has been asked for since a cycle, or when much waits; a script that
    asks for one operation after another is not disturbed, and has one round for all of them.

    Args:
        collective: of the set's ranks; owned from here on.
        ranks: the set's ranks, as the script counts them.
        ledger: where the time goes is booked there.
        is_crowded: ranks that compute leave no core idle.
    """

    def __init__(
        self,
        collective: Collective,
        ranks: Sequence[int],
        *,
        settings: Settings,
        timeline: Timeline,
        ledger: Ledger,
        name: str,
        is_crowded: bool,
    ) -> None:
        self.collective, self.ranks = collective, tuple(ranks)
        collective.set_deadline(None)  # a rank may compute for as long as it likes; its death ends every wait
        self._settings, self._timeline, self._ledger, self._name = settings, timeline, ledger, name
        self._pace = _Pace.of(settings.cycle_s, is_crowded=is_crowded)
        self._negotiator = Negotiator(ranks, num_remembered=settings.num_remembered)
        self._executor = Executor(collective, fusion_bytes=settings.fusion_bytes, ranks=self.ranks, timeline=timeline)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._driving = threading.Lock()
        # Whoever asks adds to these three without a lock, whose taking would cost half as much as all else that asking
        # does here; who drives, or ends the channel, takes from them. Python does each single change of a list or
        # dictionary whole.
        self._asked: dict[str, Operation] = {}  # under way, by name
        self._new: list[Operation] = []  # that the others have not heard of
        self._new_bytes = 0  # roughly, if several threads ask
        self._undone: list[Operation] = []  # that a batch has failed with; their names may be asked for anew
        self._is_idle = True  # the channel's thread sleeps until something is asked for
        self._awaking = threading.Condition(self._lock)  # it alone waits for this
        self._is_urgent = threading.Event()  # it is not to wait for quiet
        self._has_joined = False
        self._last_joined: int | None = None
        self._missing: dict[str, list[int]] = {}  # who has not asked for what the others wait for
        self._warned_s = time.monotonic()
        self._failure: Exception | None = None
        self._is_closed = False
        self._is_ended = False  # closed or failed: nothing can be asked for any more
        self._thread: threading.Thread | None = None

    def submit(self, operation: Operation) -> None:
        """Ask for an operation, which is taken up when all ranks have.

        Raises:
            ValueError: one of that name is under way on this rank.
            HorovodInternalError: an earlier one has ended the channel.
        """
        request = operation.request
        if self._asked.setdefault(request.name, operation) is not operation:
            raise ValueError(
                f"{request.name!r} is under way on this rank already; wait for it, or give this operation another name"
            )
        if self._is_ended:  # what was asked for before that is ended by who ends the channel
            self._asked.pop(request.name, None)
            raise self._refusal()
        if self._timeline.is_on:
            self._timeline.asked(request)
        self._new.append(operation)
        before_bytes = self._new_bytes
        self._new_bytes = now_bytes = before_bytes + request.num_bytes
        if self._is_idle:
            self._awake()
        if before_bytes < self._pace.enough_bytes <= now_bytes:
            self._is_urgent.set()

    def room_of(self, request: Request) -> Room | None:
        """Where the request's tensors were reduced before; none if they were not, or elsewhere."""
        return self._executor.rooms.find(request)

    def poll(self, operation: Operation) -> bool:
        """Whether it is over; somebody asks for it, so that it does not lie any longer."""
        if not operation.is_over:
            self._is_urgent.set()
        return operation.is_over

    def wait(self, operation: Operation) -> None:
        """Return once it is over. Raises what ended it."""
        if not operation.is_over:
            with self._ledger.waiting():
                self._wait(operation)
        if operation.error is not None:
            raise operation.error

    def join(self) -> int:
        """Take part with zeros until all ranks have joined; the rank that came last."""
        with self._lock:
            if self._is_ended:
                raise self._refusal()
            self._has_joined, self._last_joined = True, None
        with self._ledger.waiting(), self._at_the_wheel():
            while self._last_joined is None:
                self._round()
                if self._failure is not None:
                    raise self._failure
            return self._last_joined

    def close(self, *, is_collective: bool = True) -> None:
        """End what is under way.

        Args:
            is_collective: the others are to hear of it; they get some seconds to.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = self._is_ended = True
            self._is_urgent.set()
            self._awaking.notify()
            self._changed.notify_all()
        if is_collective and self._failure is None and self._driving.acquire(timeout=_LEAVE_WITHIN_S):
            try:
                self._say_goodbye()
            finally:
                self._driving.release()
        self._fail(HorovodInternalError("Horovod has been shut down on this rank"))
        self.collective.abort("Horovod has been shut down on this rank")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.collective.close()

    def _wait(self, operation: Operation) -> None:
        while not operation.is_over:
            with self._at_the_wheel(is_patient=False) as drives:
                while drives and not operation.is_over and self._failure is None:
                    self._round()
            if not drives:
                with self._lock:
                    is_told = self._changed.wait_for(
                        lambda: operation.is_over or not self._driving.locked(), self._patience_s
                    )
                if not is_told:
                    self._look_for_stalls()

    # --- rounds -------------------------------------------------------------------------------------------------

    @contextmanager
    def _at_the_wheel(self, *, is_patient: bool = True) -> Iterator[bool]:
        """This thread alone drives rounds inside, if it is given true: it is not where another does, unless patient."""
        if not self._driving.acquire(blocking=is_patient):
            yield False
            return
        try:
            yield True
        finally:
            with self._lock:
                self._driving.release()
                self._changed.notify_all()

    def _serve(self) -> None:
        """What the channel's thread does: drive operations that nobody waits for."""
        while self._wait_for_quiet():
            with self._at_the_wheel(is_patient=False) as drives:
                if drives and self._asked and not self._is_ended:
                    self._round()
            if not drives:  # whoever drives is waiting himself
                with self._lock:
                    self._changed.wait_for(lambda: not self._driving.locked(), self._patience_s)
                self._look_for_stalls()

    def _wait_for_quiet(self) -> bool:
        """Return once something is asked for, and nothing more for a cycle, or much; false at the channel's end."""
        with self._lock:
            self._awaking.wait_for(self._has_work)
            self._is_idle = False
        patience_s, count = self._pace.look_s, -1
        for _ in range(_MOST_LOOKS):
            if self._is_ended or count == len(self._new):
                break
            count = len(self._new)
            if self._is_urgent.wait(patience_s):
                break
            patience_s = min(2 * patience_s, self._pace.longest_s)
        self._is_urgent.clear()
        return not self._is_ended

    def _has_work(self) -> bool:
        """Whether the channel's thread is not to sleep.

        Who asks takes it for awake, and whoever waits may have done all of it before this look. So before each look it
        says anew that it sleeps.
        """
        self._is_idle = True
        return self._is_ended or bool(self._asked)

    def _awake(self) -> None:
        """Have the channel's thread look, which begins with the first operation."""
        with self._lock:
            self._is_idle = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"paceline {self._name}", daemon=True)
                self._thread.start()
            else:
                self._awaking.notify()

    def _round(self) -> None:
        """Say what is new, hear the others, and do what is due on all ranks."""
        try:
            has_joined = self._has_joined  # first, as what this rank asked for before it joined is to be told by then
            mine = self._negotiator.news(self._take_new(), has_joined=has_joined)
            self._timeline.cycle()
            said = self.collective.all_gather_object(mine.as_plain())
            everyone = [News.from_plain(each) for each in said]
            due = self._negotiator.hear(everyone)
            if self._negotiator.is_leaving:
                gone = ", ".join(str(self.ranks[rank]) for rank in sorted(self._negotiator.is_leaving))
                waiting = "".join(f", and {name!r} waits here for all ranks" for name in [*self._asked][:1])
                raise HorovodInternalError(f"rank {gone} has shut Horovod down{waiting}")
            for batch in self._executor.batches(due):
                self._do(batch)
            last = self._negotiator.last_joined()
            if last is not None:
                self._last_joined, self._has_joined = last, False
            if not due and not any(news.known or news.requests for news in everyone):
                self._missing = self._negotiator.missing()
                time.sleep(_CYCLE_S)  # all wait for different things
        except Exception as error:
            self._fail(error)

    def _take_new(self) -> list[Request]:
        new = self._new.copy()
        del self._new[: len(new)]  # more may have come since
        self._new_bytes, now_s = 0, time.monotonic()
        for operation in new:
            operation.told_s = now_s
        return [operation.request for operation in new]

    def _do(self, batch: Batch) -> None:
        operations = self._take(batch.names)
        mine = [operation for operation in operations if operation is not None]
        error = batch.ready[0].error
        if error is not None:
            for operation in mine:
                operation.error = HorovodInternalError(error)
        else:
            try:
                if self._failure is not None:  # another thread's; what it has ended is no longer there to be done
                    raise self._failure
                with self._ledger.moving(self.collective.timing):
                    self._executor.run(batch, operations)
            except BaseException:
                self._undone += mine  # they are to end with everything else that is under way
                raise
        if self._timeline.is_on:
            for operation in mine:
                self._timeline.done(operation.request)
        self._end(mine)

    def _take(self, names: Sequence[str]) -> list[Operation | None]:
        """This rank's own operations of those that are due; none where zeros stand for it, as it has joined."""
        if not self._has_joined:
            return [*map(self._asked.pop, names, itertools.repeat(None))]
        # Another of its threads may have asked by now. Who has not been told of that does without it this time.
        return [self._asked.pop(name, None) if self._is_told(name) else None for name in names]

    def _is_told(self, name: str) -> bool:
        operation = self._asked.get(name)
        return operation is not None and operation.told_s < math.inf

    def _end(self, operations: Sequence[Operation]) -> None:
        with self._lock:
            for operation in operations:
                operation.is_over = True
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, HorovodInternalError):
            cause = error
            error = HorovodInternalError(str(cause) if isinstance(cause, PacelineError) else repr(cause))
            error.__cause__ = cause
        with self._lock:
            self._failure, self._is_ended = self._failure or error, True
            ended = [*self._undone, *self._asked.values()]
            self._undone, self._asked, self._new = [], {}, []
            self._awaking.notify()
        for operation in ended:
            operation.error = self._failure
        self._end(ended)

    def _refusal(self) -> HorovodInternalError:
        """Why nothing can be asked for any more."""
        if self._is_closed:
            return HorovodInternalError("Horovod has been shut down on this rank")
        return HorovodInternalError(f"an earlier operation has failed: {self._failure}")

    def _say_goodbye(self) -> None:
        self.collective.set_deadline(_LEAVE_WITHIN_S)
        try:
            said = self.collective.all_gather_object(self._negotiator.news([], is_leaving=True).as_plain())
            if not all(News.from_plain(each).is_leaving for each in said):
                return
            self.collective.barrier()
        except Exception:
            return  # who has not come in time learns of it from the closed collective

    @property
    def _patience_s(self) -> float | None:
        """How long to wait before looking whether something stalls; None: for ever."""
        limits_s = [each for each in (self._settings.stall_warning_s, self._settings.stall_shutdown_s) if each]
        return min(limits_s, default=None)

    def _look_for_stalls(self) -> None:
        """Name what has waited for so long, and for whom: in a warning now and then, or in the error that ends all."""
        now_s, warning_s, shutdown_s = time.monotonic(), self._settings.stall_warning_s, self._settings.stall_shutdown_s
        with self._lock:
            asked = [*self._asked.values()]
            late = [each for each in asked if warning_s and now_s - max(each.told_s, self._warned_s) > warning_s]
            too_late = [each for each in asked if shutdown_s and now_s - each.told_s > shutdown_s]
            if late:
                self._warned_s = now_s
        if too_late:
            text = f"operations have waited for longer than {shutdown_s:g} s: {self._who_is_missing(too_late, now_s)}"
            self._fail(HorovodInternalError(f"{text} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"))
            self.collective.abort(text)
        elif late:
            warnings.warn(
                f"operations wait: {self._who_is_missing(late, now_s)}. Do all ranks issue the same operations? "
                "(HOROVOD_STALL_CHECK_TIME_SECONDS, HOROVOD_STALL_CHECK_DISABLE)",
                stacklevel=1,  # whoever looks: the script's own line is not always above
            )

    def _who_is_missing(self, late: Sequence[Operation], now_s: float) -> str:
        texts = []
        for operation in late:
            missing = self._missing.get(operation.request.name)
            who = f"rank {', '.join(map(str, missing))}" if missing else "another rank, which has asked for nothing,"
            texts.append(f"{operation.request.name!r} for {now_s - operation.told_s:.0f} s: {who} did not ask for it")
        return "; ".join(texts)
