"""A small shard in shared memory, with which workers on the server's host serve themselves.

The server lends its shard when that is quiet: nobody waits, and each worker's clock is all that the rule knows. Whoever
pushes then makes the update itself, under a lock, instead of waking the server. Whatever is no plain push goes to the
server as a message, and has it take the shard back.

The shard is there twice. An update reads the version in force and writes the other. Then one word says that this one is
in force. So a process that is killed at any moment leaves the shard as it was before, or as it is after.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.mutex import MUTEX_BYTES, RobustMutex
from paceline.elastic.lanes import Done
from paceline.layout import ALIGNMENT_BYTES, Layout
from paceline.messages import as_bytes
from paceline.server.closing import Applied
from paceline.server.ranges import KeyRange, span_bytes

_LENT, _VERSION, _NUM_TOLD, _TERMS_BYTES, _EVENTS, _SLEEPS = range(6)  # 64-bit words of the head
_HEAD_BYTES = 64
_TERMS_STOP = _HEAD_BYTES + 16 * 1024
_NUM_LOGGED = 4096  # gradients applied that the server has yet to hear of
_LOG_WORDS = len(Applied._fields)
_LOG_STOP = _TERMS_STOP + 8 * _LOG_WORDS * _NUM_LOGGED
ITERATION, NUM_APPLIED, WORKERS = range(3)  # 64-bit words of a version, where some for each worker follow:
CLOCK, PULLED_AT, HAS_PUSHED, _PUSHED = range(4)
_DONE_WORDS = len(Done._fields)
_COUNTED = _PUSHED + _DONE_WORDS
_WORKER_WORDS = _COUNTED + _DONE_WORDS
_NUM_PLACES = 4  # of a parameter's size, in a version: itself, and three states of Adam's


def loan_bytes(layout: Layout, num_places: int) -> int:
    return MUTEX_BYTES + _LOG_STOP + 2 * _version_bytes(layout, num_places)


def _version_bytes(layout: Layout, num_places: int) -> int:
    return _words_bytes(num_places) + _NUM_PLACES * (layout.num_bytes + ALIGNMENT_BYTES * len(layout.segments))


def _words_bytes(num_places: int) -> int:
    return _aligned(8 * (WORKERS + _WORKER_WORDS * num_places))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@final
class Version:
    """One of the two: words, then the parameters, laid out like the model, then the optimizer's state."""

    def __init__(self, memory: Tensor, layout: Layout, pieces: KeyRange, num_places: int) -> None:
        raw, start = as_bytes(memory), _words_bytes(num_places)
        self.words = raw[:start].cast("q")
        self.parameters = memory[start : start + layout.num_bytes]
        states_start = start + _aligned(layout.num_bytes)
        self._states, self._states_raw = memory[states_start:], raw[states_start:]
        first, last = span_bytes(layout, pieces)
        self._used = [raw[:start], raw[start + first : start + last], self._states_raw]

    def copy_(self, other: "Version") -> None:
        """Have all that the other has, whose states are like these."""
        for own, given in zip(self._used, other._used, strict=True):
            own[:] = given  # a third of what torch's copy_ takes

    def pushed(self, start: int, done: Done) -> None:
        """The worker whose words begin there has done this when what it pushes now counts."""
        start += _PUSHED
        self.words[start : start + _DONE_WORDS] = array("q", done)

    def counted(self, start: int) -> None:
        """This version has the last gradient of the worker whose words begin there: take over what that had done."""
        words, start = self.words, start + _PUSHED
        words[start + _DONE_WORDS : start + 2 * _DONE_WORDS] = words[start : start + _DONE_WORDS]

    def done(self, start: int) -> Done:
        """What it has done, by its last push that counts."""
        start += _COUNTED
        return Done(*self.words[start : start + _DONE_WORDS])

    def states(self, described: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """The optimizer's state: name, dtype and shape of each tensor, which lie one after the other.

        What the version takes up follows from that.
        """
        start, found = 0, {}
        for name, dtype_name, shape in described:
            dtype: torch.dtype = getattr(torch, dtype_name)
            stop = start + math.prod(shape) * dtype.itemsize
            found[name] = self._states[start:stop].view(dtype).view(tuple(shape))
            start = _aligned(stop)
        self._used[-1] = self._states_raw[:start]
        return found


@final
class Loan:
    """The memory of a shard that is lent, as the server or a worker sees it.

    Args:
        memory: `loan_bytes` of uint8, which begin with a mutex, else zeroed at first.
        pieces: of the layout, which the server has.
        num_places: workers of higher ranks have none.
    """

    def __init__(self, memory: Tensor, layout: Layout, pieces: KeyRange, num_places: int) -> None:
        self.layout, self.lock = layout, RobustMutex(memory.data_ptr())
        self.starts = range(WORKERS, WORKERS + _WORKER_WORDS * num_places, _WORKER_WORDS)
        """Where each worker's words begin in a version."""
        memory = memory[MUTEX_BYTES:]
        self._events_address = memory.data_ptr() + 8 * _EVENTS
        raw = as_bytes(memory)
        self._head, self._terms = raw[:_HEAD_BYTES].cast("q"), raw[_HEAD_BYTES:_TERMS_STOP]
        self._log = raw[_TERMS_STOP:_LOG_STOP].cast("q")
        size = _version_bytes(layout, num_places)
        self.versions = [
            Version(memory[start : start + size], layout, pieces, num_places) for start in (_LOG_STOP, _LOG_STOP + size)
        ]

    @property
    def number(self) -> int:
        """Which loan this is; 0: the server has the shard."""
        return self._head[_LENT]

    @number.setter
    def number(self, number: int) -> None:
        self._head[_LENT] = number

    @property
    def in_force(self) -> int:
        """The index of the version that counts."""
        return self._head[_VERSION]

    @property
    def iteration(self) -> int:
        return self.versions[self.in_force].words[ITERATION]

    def put_in_force(self, index: int) -> None:
        futex.fence()
        self._head[_VERSION] = index

    def sleep(self, timeout_s: float, *, unless: Callable[[], bool]) -> None:
        """Sleep until `wake`, or for no reason; the lock must be free."""
        with self.lock:
            self._head[_SLEEPS] = 1
            events = self._head[_EVENTS]
        if not unless():
            futex.wait(self._events_address, events, timeout_s)

    def wake(self) -> None:
        """Those that sleep; the lock must be held, since a word that nobody sleeps on is left alone."""
        if self._head[_SLEEPS]:
            self._head[_SLEEPS] = 0
            self._head[_EVENTS] = (self._head[_EVENTS] + 1) % 2**31
            futex.wake(self._events_address)

    def has_room(self) -> bool:
        """Whether another gradient of each worker can be noted."""
        num_noted = self.versions[self.in_force].words[NUM_APPLIED] - self._head[_NUM_TOLD]
        return num_noted + len(self.starts) <= _NUM_LOGGED

    def note(self, number: int, applied: Iterable[int]) -> None:
        """A gradient, the `number`th of all, is part of the version to be in force next: the fields of `Applied`."""
        start = number % _NUM_LOGGED * _LOG_WORDS
        for place, value in enumerate(applied, start):
            self._log[place] = value

    def take_notes(self) -> list[Applied]:
        """Gradients applied since the last call, which is the server's."""
        futex.fence()
        found = []
        for number in range(self._head[_NUM_TOLD], self.versions[self.in_force].words[NUM_APPLIED]):
            start = number % _NUM_LOGGED * _LOG_WORDS
            found.append(Applied(*self._log[start : start + _LOG_WORDS]))
        self._head[_NUM_TOLD] += len(found)
        return found

    def read_terms(self) -> bytes:
        """The terms on which the shard was lent last."""
        return bytes(self._terms[: self._head[_TERMS_BYTES]])

    def write_terms(self, text: bytes) -> None:
        """
        Raises:
            ValueError: the text is too long.
        """
        if len(text) > len(self._terms):
            raise ValueError(f"terms of {len(text)} bytes are too long")
        self._terms[: len(text)] = text
        self._head[_TERMS_BYTES] = len(text)

    @property
    def num_told(self) -> int:
        """Gradients applied of which the server has heard."""
        return self._head[_NUM_TOLD]
