"""A worker's place in a crew: what it says to its deputy, and hears from it."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, final

from paceline.comm.base import Timing
from paceline.comm.shared_memory.block import SharedBlock
from paceline.engines.scripting import Outcome
from paceline.engines.virtual.process import Process, Scheduler
from paceline.engines.virtual.spread.carrier import Carrier
from paceline.engines.virtual.spread.channel import Channel
from paceline.engines.virtual.spread.messages import Answer, Ask, Begin, Busy, Keep, Over, Print
from paceline.engines.virtual.spread.turns import BUSY, Turns
from paceline.errors import Aborted
from paceline.records import Record


@final
class Seat:
    """One worker's. What needs no answer leaves with what does, or with word that it computes where that is not known.

    Args:
        process: the worker's, in the crew's own scheduler, which only takes turns.
        turns: of the crew's workers.
    """

    def __init__(self, channel: Channel, rank: int, process: Process, scheduler: Scheduler, turns: Turns) -> None:
        self.rank, self.process = rank, process
        self.carrier = Carrier()
        self.collective_timing, self.store_timing = Timing(), Timing()
        self.is_stopping = self._is_ending = self._goes_on = False
        self.num_answers = 0
        self._known_s = -math.inf  # to the deputy: until when this worker computes, since its last answer
        self._channel, self._scheduler, self._turns = channel, scheduler, turns
        self._unsaid: deque[object] = deque()  # threads of the script may print
        self._heard = b""

    def hear(self, content: bytes) -> None:
        """An answer has arrived, which the worker takes when it is resumed."""
        self._heard = content

    # --- what the worker says -----------------------------------------------------------------------------------

    def begin(self, method: str, *arguments: Any) -> None:
        """Have the deputy start something at this time."""
        self.process.before_exchange()
        self.tell(method, *arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        """Have the deputy do something that others do not notice."""
        self._unsaid.append(Begin(self.process.now_s, method, arguments))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Have the deputy do something, and wait until it has.

        Raises:
            Exception: what the deputy met with; the worker's clock has moved on all the same.
        """
        self._scheduler.require_waitable()
        if method == "poll":  # which is not noticed
            return self._ask(method, arguments, ahead_s=None)
        # Files and memory are asked for only where no step is under way.
        self.process.before_exchange()
        answer = self._ask(method, arguments, ahead_s=self.process.promise.ahead_s)
        if self._goes_on:
            self.process.after_exchange()
            self._known_s = self.process.promise.until_s
        return answer

    def keep(self, record: Record) -> None:
        self._unsaid.append(Keep(record))

    def print(self, line: str) -> None:
        self._unsaid.append(Print(line))

    def over(self, outcome: Outcome) -> None:
        self._say(Over(outcome))

    def promise(self, until_s: float, *, may_leave: bool) -> None:
        """Let others know until when they need not wait for this worker, and let those be answered who wait here."""
        if until_s > self._known_s:
            self._say(Busy(until_s), mark=BUSY)
            self._known_s = until_s
        if may_leave and self.process.may_wait:
            self._turns.leave(self.rank, until_s)
            self._scheduler.give_back()

    def allocate(self, of: str, num_bytes: int) -> Any:
        """Memory that the deputy sees too; `of` says whose allocation it is."""
        return self.carrier.share(SharedBlock.open(self.ask("allocate", of, num_bytes)))

    def require_going(self) -> None:
        """Nobody begins another step once a worker has failed."""
        if self._is_ending:
            raise Aborted("the run is ending because another member failed")

    def take_answer(self) -> Any:
        answer: Answer = self.carrier.unpack(self._heard)
        self.num_answers += 1
        self.process.advance_to(answer.now_s)
        for own, theirs in zip((self.collective_timing, self.store_timing), answer.timings, strict=True):
            vars(own).update(theirs)
        self.is_stopping, self._is_ending, self._goes_on = answer.is_stopping, answer.is_ending, answer.goes_on
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _ask(self, method: str, arguments: tuple[Any, ...], *, ahead_s: float | None) -> Any:
        self._known_s = -math.inf
        self._say(Ask(self.process.now_s, method, arguments, ahead_s))
        self._scheduler.give_back()
        return self.take_answer()

    def _say(self, last: object, *, mark: int = 0) -> None:
        said = []
        while self._unsaid:
            said.append(self._unsaid.popleft())
        said.append(last)
        self._channel.send(self.rank | mark, self.carrier.pack(said))
