"""The order of work among ranks that share memory: numbered steps, each loaded, exchanged and stored in turn."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from paceline.comm.base import NonFinite, Timing, Work
from paceline.comm.shared_memory.rendezvous import FIRST_NUMBER, LOOK_INTERVAL_S, NUM_SIGNATURES, Obstacle, Rendezvous
from paceline.comm.signature import Signature
from paceline.errors import Aborted, PacelineError, UsageError

NUM_SLOTS = 4
MIXED_INTERVAL_S = 1e-3
"""The longest sleep in a collective while messages wait, and the other way round: neither is woken for the other."""


@dataclass(eq=False)
class Step:
    """One meeting of all ranks. The three calls get the number of the step's staging slot; a step may lack any."""

    signature: Signature
    load: Callable[[int], object] | None = None
    """Makes this rank's input readable for all."""
    exchange: Callable[[int], NonFinite | None] | None = None
    """Does this rank's part; every rank has loaded. Returns what a watched step has found there."""
    store: Callable[[int], object] | None = None
    """Takes the result; every rank has exchanged, if the step awaits that."""
    uses_slot: bool = True
    """Whether data passes through one of the staging slots, on any rank."""
    awaits_all: bool = False
    """Whether the step is over only when every rank has exchanged."""
    is_watched: bool = False
    """Whether the result is looked at for what is not finite."""
    moved_bytes: int = 0
    """What this rank reads from or writes for others."""
    finish: Callable[[], None] | None = None
    """What is to be done once when the step is over."""

    number: int = field(default=0, init=False)
    slot: int = field(default=0, init=False)
    slot_free_at: int = field(default=FIRST_NUMBER, init=False)
    """The step that has to be over before the slot may be written again."""
    nonfinite: NonFinite | None = field(default=None, init=False)
    """What was found when the step was last over."""


@final
class Pipeline:
    """Takes steps through their phases, in order, whenever its rank calls: there is no helper thread.

    Many operations can be under way at once: a step loads before earlier ones have exchanged, as long as there are
    staging slots and places for signatures.
    """

    def __init__(self, rendezvous: Rendezvous, timing: Timing) -> None:
        self._rendezvous = rendezvous
        self._timing = timing
        self.advance_messages: Callable[[], bool] = lambda: False
        """Advances the messages between single ranks; says whether any is left."""
        self._issued = FIRST_NUMBER
        self._over = FIRST_NUMBER
        self._to_load: deque[Step] = deque()
        self._to_exchange: deque[Step] = deque()
        self._to_store: deque[Step] = deque()
        self._slots_used = 0
        self._last_user = [FIRST_NUMBER] * NUM_SLOTS

    def submit(self, steps: Sequence[Step]) -> Work:
        """Append steps and load what can be loaded at once; never blocks. Steps that are over may come again.

        Raises:
            UsageError: a step is still under way.
            PeerLost, DeadlineExceeded, Aborted, TensorMismatch, UsageError: it has failed before or is closed.
        """
        if self._rendezvous.failure is not None:
            self._rendezvous.check()
        for step in steps:
            if step.number > self._over:
                raise UsageError("a persistent operation was started again before it was over; wait for it first")
            self._issued += 1
            step.number = self._issued
            if step.uses_slot:
                step.slot = self._slots_used % NUM_SLOTS
                step.slot_free_at = self._last_user[step.slot]
                self._last_user[step.slot] = step.number
                self._slots_used += 1
            self._to_load.append(step)
        self._advance(only_loads=True)
        return _Submitted(self, self._issued, steps)

    @property
    def issued(self) -> int:
        """The number of the last step that was submitted."""
        return self._issued

    def poll(self, number: int) -> bool:
        """Advance without blocking; whether step `number` is over."""
        if self._over >= number:
            return True
        self._rendezvous.check()
        self._advance()
        if self._over >= number:
            return True
        self._rendezvous.look(self._obstacle())
        return False

    def wait(self, number: int) -> None:
        started_s = time.perf_counter()
        while self._over < number:
            if self._rendezvous.failure is not None:
                self._rendezvous.check()
            if not self._advance():
                interval_s = MIXED_INTERVAL_S if self.advance_messages() else LOOK_INTERVAL_S
                obstacle = self._obstacle()
                self._rendezvous.stand(obstacle)
                self._rendezvous.wait_for_event(obstacle, started_s, interval_s=interval_s)

    def advance(self) -> bool:
        """Advance without blocking; whether any step is left."""
        if self._over == self._issued:
            return False
        self._advance()
        return self._over < self._issued

    def close(self) -> None:
        self._to_load.clear()
        self._to_exchange.clear()
        self._to_store.clear()

    def _advance(self, *, only_loads: bool = False) -> bool:
        """Do everything that is possible now, or load; whether that was anything.

        Right after a backward pass no code is in the caches, so that this looks by itself whether a phase has steps:
        most all-reduces are alone, and go through it in two calls.
        """
        started_s = time.perf_counter()
        advanced = False
        try:
            if only_loads:
                advanced = self._load()
            while not only_loads and self._over < self._issued:
                exchanged = bool(self._to_exchange) and self._exchange()
                stored = bool(self._to_store) and self._store()
                loaded = bool(self._to_load) and self._load()
                if not (exchanged or stored or loaded):
                    break
                advanced = True
        except PacelineError:
            raise
        except BaseException as error:
            # A step that ended halfway cannot be taken up again: tell the others at once.
            self._rendezvous.leave(Aborted(f"rank {self._rendezvous.name} failed with {error!r}"))
            raise
        if advanced:
            self._timing.communication_s += time.perf_counter() - started_s
        return advanced

    def _load(self) -> bool:
        advanced = False
        while self._to_load:
            step = self._to_load[0]
            needed = max(step.slot_free_at, step.number - NUM_SIGNATURES)
            if self._over < step.slot_free_at or not self._rendezvous.done.reached(needed):
                break
            self._to_load.popleft()
            if step.load is not None:
                step.load(step.slot)
            self._rendezvous.arrive(step.number, step.signature)
            self._to_exchange.append(step)
            advanced = True
        return advanced

    def _exchange(self) -> bool:
        advanced = False
        while self._to_exchange and self._rendezvous.arrived.reached(self._to_exchange[0].number):
            step = self._to_exchange.popleft()
            self._rendezvous.require_agreement(step.number, step.signature)
            step.nonfinite = step.exchange(step.slot) if step.exchange is not None else None
            if step.is_watched and step.awaits_all:
                self._rendezvous.tell(step.number, step.nonfinite)
            self._rendezvous.finish(step.number)
            self._timing.moved_bytes += step.moved_bytes
            if step.awaits_all or step.store is not None or step.finish is not None or self._to_store:
                self._to_store.append(step)
            else:
                self._over = step.number
            advanced = True
        return advanced

    def _store(self) -> bool:
        advanced = False
        while self._to_store:
            step = self._to_store[0]
            if step.awaits_all and not self._rendezvous.done.reached(step.number):
                break
            self._to_store.popleft()
            if step.is_watched and step.awaits_all:
                step.nonfinite = self._rendezvous.found(step.number)
            if step.store is not None:
                step.store(step.slot)
            if step.finish is not None:
                step.finish()
            self._over = step.number
            advanced = True
        return advanced

    def _obstacle(self) -> Obstacle:
        """What the earliest unfinished step waits for."""
        if self._to_store:
            step = self._to_store[0]
            return Obstacle(self._rendezvous.done, step.number, step.signature)
        if self._to_exchange:
            step = self._to_exchange[0]
            return Obstacle(self._rendezvous.arrived, step.number, step.signature)
        step = self._to_load[0]
        return Obstacle(self._rendezvous.done, _needs_done(step), step.signature)


@final
class _Submitted(Work):
    """Steps under way, of which the last has a number."""

    def __init__(self, pipeline: Pipeline, number: int, steps: Sequence[Step]) -> None:
        self._pipeline, self._number, self._steps = pipeline, number, steps

    def poll(self) -> bool:
        return self._pipeline.poll(self._number)

    def wait(self) -> None:
        self._pipeline.wait(self._number)

    @property
    def nonfinite(self) -> NonFinite | None:
        for step in self._steps:
            if step.nonfinite is not None:
                return step.nonfinite
        return None


def _needs_done(step: Step) -> int:
    """The step that all must have done before this one's slot and its signature's place may be written."""
    return max(step.slot_free_at, step.number - NUM_SIGNATURES)
