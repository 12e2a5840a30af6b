"""Where the ranks of one host meet: who has come how far, who left and why, and how to wait for the others."""

import os
import select
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn, final

from paceline.comm.base import NonFinite, Timing
from paceline.comm.rank_errors import ALIKE, disagreement, late
from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.signature import SIGNATURE_BYTES, Signature
from paceline.errors import CallMismatch, PeerLost, UsageError

# Every rank has one page that it alone writes. First a cache line of 32-bit words:
_EVENTS, _ARRIVED, _DONE, _DEPARTED = 0, 1, 2, 3  # EVENTS counts the changes that others sleep on
_SLEEPS = 4  # whether this rank sleeps, or is about to, on another's events
_STANDS_AT = 5  # the last step at which this rank has waited for others to arrive, and for nothing else
_IS_THROUGH = 6  # whether it waits only until others are through as well
# then a line with a doorbell that others ring and this rank sleeps on,
_BELL = 16
_NUM_WORDS = 32
# then why the rank left, and then its signature of each of the last NUM_SIGNATURES steps.
_REASON = slice(128, 1024)
_SIGNATURES_START = 1024
_SIGNATURE_STRIDE = 32
_FOUND = struct.Struct("<HxxI")  # behind a signature: 1 + the rank of what is not finite, if anything, and the element
NUM_SIGNATURES = 256
PAGE_BYTES = 16384

_MASK = 2**32 - 1
# Counters start shortly before they wrap around, so that every run passes there.
FIRST_NUMBER = 2**32 - 100
# A waiting rank first offers its core to others for so long: waking a sleeper can take longer than the wait.
_YIELD_S = 1e-3
LOOK_INTERVAL_S = 0.2
_BLIND_SLEEP_S = 1e-3  # the longest sleep where a wake may be missed


@final
class Counter:
    """How far ranks have come: 32-bit words that only grow (modulo 2**32), each written by one rank alone."""

    def __init__(self, word: int, mine: memoryview, others: Mapping[int, memoryview]) -> None:
        """`others`: the words of every rank that is waited for; the one at index `word` counts."""
        self._word = word
        self._mine = mine
        self._others = others
        self._floor = FIRST_NUMBER

    @staticmethod
    def prepare(word: int, mine: memoryview) -> None:
        """Set the word before anyone sees it."""
        mine[word] = FIRST_NUMBER & _MASK

    def set(self, number: int) -> None:
        """Publish how far this rank has come, and all that it wrote before."""
        futex.fence()
        self._mine[self._word] = number & _MASK

    def reached(self, number: int) -> bool:
        """Whether every other rank has come to `number`; what they wrote before can then be read."""
        if self._floor >= number:
            return True
        floor, word, least = self._floor, self._word, -1
        # No rank is behind the floor or 2**32 ahead of it, so the difference is exact.
        for words in self._others.values():
            ahead = (words[word] - floor) & _MASK
            if not 0 <= least <= ahead:
                least = ahead
        futex.fence()
        self._floor = floor + least if self._others else number
        return self._floor >= number

    def missing(self, number: int) -> list[int]:
        floor, word = self._floor, self._word
        return [rank for rank, words in self._others.items() if floor + ((words[word] - floor) & _MASK) < number]


class Obstacle(NamedTuple):
    """What keeps an operation: all others have yet to come to a number."""

    counter: Counter
    number: int
    signature: Signature
    """What the operation is, for errors."""

    def missing(self) -> list[int]:
        return self.counter.missing(self.number)


@final
class _Peer:
    """Another rank's page, and a handle that tells whether its process lives."""

    def __init__(self, rank: int, address: BlockAddress) -> None:
        self.rank = rank
        self.pid = address.pid
        try:
            self.pidfd = os.pidfd_open(address.pid)
        except ProcessLookupError:
            raise PeerLost(f"rank {rank} is lost: its process {address.pid} ended before all ranks had met") from None
        try:
            self.block = SharedBlock.open(address)  # after: another process with the peer's number has not its memory
        except PeerLost as error:
            os.close(self.pidfd)
            raise PeerLost(f"rank {rank} is lost: {error}") from None
        self._process = select.poll()
        self._process.register(self.pidfd, select.POLLIN)
        self.words = self.block.buffer[: 4 * _NUM_WORDS].cast("I")
        self.events_address = self.block.tensor.data_ptr() + 4 * _EVENTS
        self.bell_address = self.block.tensor.data_ptr() + 4 * _BELL

    def is_alive(self) -> bool:
        """A pidfd is readable from when the process ends, also while nobody has reaped it."""
        return not self._process.poll(0)

    def departure(self) -> str | None:
        """Why the rank no longer takes part, if it said so."""
        if not self.words[_DEPARTED]:
            return None
        futex.fence()
        return bytes(self.block.buffer[_REASON]).rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        os.close(self.pidfd)
        self.block.close()


@final
class Rendezvous:
    """One rank's view of all ranks' pages.

    Ranks go through the same numbered steps. At each a rank publishes first that it has arrived (its input can be
    read), later that it is done (it will read and write no more of this step). After a failure every call raises.
    """

    def __init__(
        self,
        *,
        rank: int,
        addresses: Sequence[BlockAddress],
        control: SharedBlock,
        deadline_s: float | None,
        timing: Timing,
        names: Sequence[int] | None = None,
    ) -> None:
        """`names`: what errors call the ranks, where that is not their numbers here."""
        self.rank = rank
        self.size = len(addresses)
        self._names = names or range(self.size)
        self.name = self._names[rank]
        self.peers: dict[int, _Peer] = {}
        self._others: tuple[memoryview, ...] = ()  # their words
        self._pages: tuple[memoryview, ...] = ()
        self._control = control
        self._words = control.buffer[: 4 * _NUM_WORDS].cast("I")
        self._events_address = control.tensor.data_ptr() + 4 * _EVENTS
        self._bell_address = control.tensor.data_ptr() + 4 * _BELL
        self._num_rings = 0
        self._always_wakes = not futex.may_skip_wakes()
        # With more ranks than cores, a rank that waits sleeps at once: others need its core.
        self._yield_s = _YIELD_S if self.size <= len(os.sched_getaffinity(0)) else 0.0
        self.deadline_s = deadline_s
        self._timing = timing
        self.failure: Exception | None = None
        """Why the rendezvous cannot be used any more, which `check` raises; none while it can."""
        self._lock = threading.RLock()  # a signal handler may abort while its own thread leaves
        self._last_look_s = time.perf_counter()
        try:
            for other, address in enumerate(addresses):
                if other != rank:
                    self.peers[other] = _Peer(self._names[other], address)
        except BaseException:
            self.close()
            raise
        others = {other: peer.words for other, peer in self.peers.items()}
        self._others = tuple(others.values())
        self._pages = tuple(peer.block.buffer for peer in self.peers.values())
        self.arrived = Counter(_ARRIVED, self._words, others)
        self.done = Counter(_DONE, self._words, others)

    @staticmethod
    def prepare(control: SharedBlock) -> None:
        """Set this rank's words before anyone sees the page."""
        words = control.buffer[: 4 * _NUM_WORDS].cast("I")
        Counter.prepare(_ARRIVED, words)
        Counter.prepare(_DONE, words)

    def arrive(self, number: int, signature: Signature) -> None:
        """Publish that this rank's input of step `number` is in place."""
        # `_signature_place` gives the same place, but each call takes 2 us right after a backward pass. So it is below.
        start = _SIGNATURES_START + number % NUM_SIGNATURES * _SIGNATURE_STRIDE
        self._control.buffer[start : start + SIGNATURE_BYTES] = signature.raw
        self._publish(_ARRIVED, number)

    def tell(self, number: int, found: NonFinite | None) -> None:
        """Write what this rank has found in its share of step `number`, before it finishes."""
        rank, element = (0, 0) if found is None else (1 + found.rank, min(found.element, _MASK))
        _FOUND.pack_into(self._control.buffer, _signature_place(number).stop, rank, element)

    def found(self, number: int) -> NonFinite | None:
        """What the first rank has found that has found anything; all have finished step `number`."""
        pages = [*self._pages]
        pages.insert(self.rank, self._control.buffer)
        for page in pages:
            rank, element = _FOUND.unpack_from(page, _signature_place(number).stop)
            if rank:
                return NonFinite(element, rank - 1)
        return None

    def finish(self, number: int) -> None:
        """Publish that this rank neither reads nor writes for step `number` any more."""
        self._publish(_DONE, number)

    def require_agreement(self, number: int, signature: Signature) -> None:
        """Compare signatures of a step at which all have arrived. Raises CallMismatch with two that differ."""
        start = _SIGNATURES_START + number % NUM_SIGNATURES * _SIGNATURE_STRIDE
        place, raw = slice(start, start + SIGNATURE_BYTES), signature.raw
        for page in self._pages:
            if page[place] != raw:
                break
        else:
            return
        raws = [bytes(page[place]) for page in self._pages]
        raws.insert(self.rank, signature.raw)
        self.fail(disagreement({name: str(Signature.unpack(raw)) for name, raw in zip(self._names, raws, strict=True)}))

    def check(self) -> None:
        """Raise if the rendezvous has failed or was aborted or closed."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def look(self, obstacle: Obstacle) -> None:
        """Raise if a rank that is missing will never come; a real look only now and then."""
        self.check()
        for rank in obstacle.missing():
            if self.peers[rank].words[_DEPARTED]:
                self._lose(obstacle, rank)
        now = time.perf_counter()
        if now - self._last_look_s < LOOK_INTERVAL_S:
            return
        self._last_look_s = now
        for rank in obstacle.missing():
            if not self.peers[rank].is_alive():
                self._lose(obstacle, rank)

    def stand(self, obstacle: Obstacle) -> None:
        """Tell the others that this rank does nothing else until the obstacle is gone."""
        if obstacle.counter is self.arrived:
            futex.fence()
            self._words[_STANDS_AT] = obstacle.number & _MASK

    def require_moving(self, obstacle: Obstacle, rank: int, *, issued: int) -> None:
        """Raise CallMismatch if the message of the rank that this one waits for cannot come: that rank stands at a step
        beyond all that this one has `issued`, and all that it has sent before is in its box."""
        theirs = self._standing_at(rank, issued=issued)
        if theirs is None or rank not in obstacle.missing():
            return
        name, peer = self._names[self.rank], self._names[rank]
        self.fail(
            CallMismatch(
                f"rank {name} waits for {obstacle.signature} from rank {peer}, which waits for rank {name} to take "
                f"part in {theirs}; {ALIKE}"
            )
        )

    def standing(self, *, issued: int) -> str | None:
        """Answers `Collective.standing` for this rank, which has begun `issued` steps."""
        for rank, peer in self.peers.items():
            theirs = self._standing_at(rank, issued=issued)
            if theirs is not None and not peer.words[_IS_THROUGH]:
                return f"rank {self._names[rank]} waits for all in {theirs}"
        return None

    def be_through(self) -> None:
        """As `Collective.be_through`."""
        self._words[_IS_THROUGH] = 1

    def _standing_at(self, rank: int, *, issued: int) -> Signature | None:
        """What a rank stands at, beyond all that this one has `issued`."""
        stands_at = self.peers[rank].words[_STANDS_AT]
        ahead = (stands_at - issued) & _MASK
        futex.fence()
        if not stands_at or not 0 < ahead <= NUM_SIGNATURES:
            return None
        return Signature.unpack(bytes(self.peers[rank].block.buffer[_signature_place(issued + ahead)]))

    def wait_for_event(
        self,
        obstacle: Obstacle,
        started_s: float,
        *,
        ready: Callable[[], bool] | None = None,
        interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Block until the obstacle is gone, or something else has happened, or it is time to look around.

        Args:
            started_s: the perf_counter at which the caller's blocking call began; the deadline counts from there.
            ready: whether there is anything to do, where others ring this rank's bell; without it the sleep is on the
                events of the first missing rank.
            interval_s: the longest to sleep.
        """
        before_s = time.perf_counter()
        try:
            self._sleep(obstacle, started_s, ready, interval_s)
        finally:
            self._timing.waiting_s += time.perf_counter() - before_s

    def _sleep(self, obstacle: Obstacle, started_s: float, ready: Callable[[], bool] | None, interval_s: float) -> None:
        missing = obstacle.missing()
        if not missing:
            return
        peer = self.peers[missing[0]]
        words, index, address = (
            (peer.words, _EVENTS, peer.events_address) if ready is None else (self._words, _BELL, self._bell_address)
        )
        seen = words[index]
        # What happens from here on changes that word and ends the sleep; what happened before is seen below.
        futex.fence()
        if ready() if ready is not None else obstacle.counter.reached(obstacle.number):
            return
        self.look(obstacle)
        if self.deadline_s is not None:
            left_s = started_s + self.deadline_s - time.perf_counter()
            if left_s <= 0:
                self._exceed(obstacle)
            interval_s = min(interval_s, max(left_s, 0.0))
        until_s = time.perf_counter() + min(self._yield_s, interval_s)
        while time.perf_counter() < until_s:
            if words[index] != seen:
                return
            os.sched_yield()
        self._words[_SLEEPS] = 1
        if not futex.flush_others():
            interval_s = min(interval_s, _BLIND_SLEEP_S)
        futex.wait(address, seen, interval_s)
        self._words[_SLEEPS] = 0

    def ring(self, rank: int) -> None:
        """Wake a rank that may sleep on its bell."""
        # Many ranks write this word, each only values that no other writes: every ring changes it.
        self._num_rings += 1
        self.peers[rank].words[_BELL] = (self._num_rings * self.size + self.rank) & _MASK
        futex.wake(self.peers[rank].bell_address)

    def fail(self, error: Exception) -> NoReturn:
        """Close the rendezvous for good, tell the others, and raise."""
        self.leave(error)
        raise error

    def leave(self, error: Exception) -> None:
        """Close the rendezvous for good and tell the others; callable from any thread, the first reason stays."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = type(error)(f"this collective is unusable since: {error}")
            reason = str(error).encode()[: _REASON.stop - _REASON.start]
            self._control.buffer[_REASON.start : _REASON.start + len(reason)] = reason
            futex.fence()
            self._words[_DEPARTED] = 1
            # If the main thread signals meanwhile, one increment can be lost: a sleeper then looks around late.
            self._words[_EVENTS] = (self._words[_EVENTS] + 1) & _MASK
            futex.wake(self._events_address)
            for peer in self.peers.values():
                futex.wake(peer.events_address)  # where the main thread of this process may sleep
                futex.wake(peer.bell_address)
            futex.wake(self._bell_address)

    def close(self) -> None:
        """Say goodbye and give back descriptors and memory; a second call does nothing."""
        self.leave(UsageError("it was closed"))
        with self._lock:
            for peer in self.peers.values():
                peer.close()
            self.peers, self._others, self._pages = {}, (), ()
            self._control.close()
            self._words = memoryview(b"")
            self.arrived = self.done = Counter(_ARRIVED, self._words, {})

    def _publish(self, word: int, number: int) -> None:
        """This rank has come so far, and all that it wrote before can be read: wake those who sleep."""
        futex.fence()
        words = self._words
        words[word] = number & _MASK
        words[_EVENTS] = (words[_EVENTS] + 1) & _MASK
        wakes = self._always_wakes
        for others in self._others:
            wakes = wakes or bool(others[_SLEEPS])
        if wakes:
            futex.wake(self._events_address)

    def _lose(self, obstacle: Obstacle, rank: int) -> None:
        # The peer may have published its part just before it went.
        futex.fence()
        if rank not in obstacle.missing():
            return
        peer = self.peers[rank]
        reason = peer.departure()
        why = f"it left ({reason})" if reason is not None else f"its process {peer.pid} ended"
        self.fail(PeerLost(f"rank {self._names[rank]} is lost: {why} during {obstacle.signature}"))

    def _exceed(self, obstacle: Obstacle) -> None:
        if missing := obstacle.missing():
            self.fail(late([self._names[rank] for rank in missing], str(obstacle.signature), self.deadline_s))


def _signature_place(number: int) -> slice:
    start = _SIGNATURES_START + number % NUM_SIGNATURES * _SIGNATURE_STRIDE
    return slice(start, start + SIGNATURE_BYTES)
