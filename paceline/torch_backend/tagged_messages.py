"""Messages between two ranks of a process group, with torch's tags, over a collective that has none."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from paceline.comm import base
from paceline.comm.arguments import flatten
from paceline.comm.helper import Helper
from paceline.errors import DeadlineExceeded, TensorMismatch
from paceline.torch_backend.works import GroupWork

# A waiting thread first offers its core (where there is one a rank), then sleeps longer and longer.
_YIELD_S = 1e-3
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3


@final
class Messages:
    """Tagged messages: of those from one rank with one tag, the earlier is received first.

    A message travels as a header (tag and length) and its bytes. A receiver keeps a copy of a message until somebody
    asks for it. Whoever waits moves all messages on, under one lock; a thread does while nobody waits.
    """

    def __init__(self, collective: base.Collective, name: str, *, deadline_s: float, yields: bool) -> None:
        """`collective` carries nothing else. `yields`: waiting threads may offer their core instead of sleeping."""
        self.deadline_s = deadline_s
        self._collective = collective
        self._yield_s = _YIELD_S if yields else 0.0
        self._lock = threading.Lock()
        self._outgoing: list[_Outgoing] = []
        self._inboxes = [_Inbox(collective, rank) for rank in range(collective.size) if rank != collective.rank]
        self._wanted: list[_Wanted] = []
        self._failure: BaseException | None = None
        self._num_helpers = 0
        self._helper = Helper(name)
        self._is_closing = False

    def send(self, tensor: Tensor, *, destination: int, tag: int) -> GroupWork:
        """Start to send; over once the tensor may be changed again."""
        raw = flatten(tensor, device_type="cpu")[0].view(torch.uint8)
        work = GroupWork(f"send to rank {destination}", base.Finished, [tensor], self._help)

        def post() -> None:
            header = torch.tensor([tag, raw.numel()])
            works = [self._collective.send(header, destination=destination)]
            if raw.numel():
                works.append(self._collective.send(raw, destination=destination))
            self._outgoing.append(_Outgoing(work, works, time.perf_counter()))

        return self._post(work, post)

    def recv(self, tensor: Tensor, *, source: int | None, tag: int) -> GroupWork:
        """Start to receive, from any rank if `source` is None."""
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        whom = "any rank" if source is None else f"rank {source}"
        work = GroupWork(f"recv from {whom}", base.Finished, [tensor], self._help)
        wanted = _Wanted(work, flat.view(torch.uint8), copy_back, source, tag, time.perf_counter())
        return self._post(work, lambda: self._wanted.append(wanted))

    def close(self) -> None:
        """Join the thread; the collective must have been aborted, so that all that is under way fails."""
        self._is_closing = True
        self._helper.close()
        self._advance()

    def _post(self, work: GroupWork, post: Callable[[], None]) -> GroupWork:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            post()
        self._advance()
        if not work.is_over:
            self._helper.call(self._serve)
        return work

    def _help(self, work: GroupWork, timeout_s: float | None) -> None:
        """Advance everything until `work` is over, or the time is."""
        pause = _Pause(self._yield_s)
        until_s = None if timeout_s is None else time.perf_counter() + timeout_s
        with self._lock:
            self._num_helpers += 1
        try:
            while not work.is_over and (until_s is None or time.perf_counter() < until_s):
                if self._advance():
                    pause.start_again()
                elif not work.is_over:
                    pause()
        finally:
            with self._lock:
                self._num_helpers -= 1

    def _advance(self) -> bool:
        """Do all that is possible without blocking; whether that was anything."""
        ended: list[Callable[[], None]] = []
        with self._lock:
            try:
                has_moved = self._receive(ended) | self._check_sent(ended)
                self._require_in_time()
            except Exception as error:
                has_moved = True
                self._fail_all(error, ended)
        # Without the lock: callbacks may send and receive.
        for end in ended:
            end()
        return has_moved

    def _check_sent(self, ended: list[Callable[[], None]]) -> bool:
        under_way = []
        for message in self._outgoing:
            if all(work.poll() for work in message.works):
                ended.append(message.work.end)
            else:
                under_way.append(message)
        has_moved = len(under_way) < len(self._outgoing)
        self._outgoing = under_way
        return has_moved

    def _receive(self, ended: list[Callable[[], None]]) -> bool:
        has_moved = False
        for inbox in self._inboxes:
            while inbox.advance(self._wanted, ended):
                has_moved = True
        return has_moved

    def _require_in_time(self) -> None:
        too_early_s = time.perf_counter() - self.deadline_s
        for pending in self._pending():
            if pending.started_s < too_early_s:
                raise DeadlineExceeded(
                    f"{pending.work.label} is not over within {self.deadline_s} s; see what keeps that rank, "
                    "or give the process group a longer timeout"
                )

    def _fail_all(self, error: Exception, ended: list[Callable[[], None]]) -> None:
        """No message can be trusted from here on: tell those who wait, here and elsewhere."""
        self._failure = error
        self._collective.abort(str(error))
        ended.extend(partial(pending.work.end, error) for pending in self._pending())
        self._outgoing, self._wanted = [], []
        for inbox in self._inboxes:
            inbox.clear()

    def _pending(self) -> "list[_Outgoing | _Wanted]":
        """All that somebody may wait for."""
        arriving = [inbox.target for inbox in self._inboxes if inbox.target is not None]
        return [*self._outgoing, *self._wanted, *arriving]

    def _serve(self) -> None:
        while self._pending() and not self._is_closing:
            # Most callers wait at once: then they are faster without this thread.
            if self._num_helpers or not self._advance():
                time.sleep(_LONGEST_SLEEP_S)


@dataclass(eq=False)
class _Outgoing:
    work: GroupWork
    works: list[base.Work]
    started_s: float


@dataclass(eq=False)
class _Wanted:
    work: GroupWork
    raw: Tensor
    copy_back: Callable[[], None] | None
    source: int | None
    tag: int
    started_s: float

    def accepts(self, rank: int, tag: int) -> bool:
        return self.source in (None, rank) and self.tag == tag

    def end(self, rank: int, num_bytes: int, ended: list[Callable[[], None]]) -> None:
        """The message is in `raw`, if it is of the right length."""
        self.work.source = rank
        if num_bytes != self.raw.numel():
            error = TensorMismatch(
                f"rank {rank} sent {num_bytes} bytes with tag {self.tag}, but the tensor to receive it has "
                f"{self.raw.numel()}; both must have one shape and dtype"
            )
            ended.append(partial(self.work.end, error))
            return
        if self.copy_back is not None:
            self.copy_back()
        ended.append(self.work.end)


@final
class _Inbox:
    """What comes from one rank: a header, its bytes, the next header."""

    def __init__(self, collective: base.Collective, rank: int) -> None:
        self.target: _Wanted | None = None
        """Who has asked for the message under way, if anybody has."""
        self._collective = collective
        self._rank = rank
        self._kept: deque[tuple[int, Tensor]] = deque()
        self._header = torch.zeros(2, dtype=torch.int64)
        self._bytes: Tensor | None = None
        """Where the bytes of the message under way go, once its header is here."""
        self._receiving: base.Work | None = None
        """The header or the bytes."""

    def advance(self, wanted: list[_Wanted], ended: list[Callable[[], None]]) -> bool:
        """Take one step, if one is possible without blocking."""
        if self._bytes is None:
            if self._hand_over(wanted, ended):
                return True
            if not any(one.source in (None, self._rank) for one in wanted):
                return False  # whoever has left may leave, as long as nobody wants anything of theirs
        if self._receiving is None:
            self._receiving = self._collective.recv(self._header, source=self._rank)
        elif not self._receiving.poll():
            return False
        elif self._bytes is None:
            self._take_header(wanted)
        else:
            self._take_bytes(self._bytes, ended)
        return True

    def clear(self) -> None:
        self.target = None
        self._kept.clear()

    def _hand_over(self, wanted: list[_Wanted], ended: list[Callable[[], None]]) -> bool:
        """Give the earliest kept message that somebody asks for to the first who does."""
        for position, (tag, raw) in enumerate(self._kept):
            for one in wanted:
                if one.accepts(self._rank, tag):
                    if raw.numel() == one.raw.numel():
                        one.raw.copy_(raw)
                    one.end(self._rank, raw.numel(), ended)
                    wanted.remove(one)
                    del self._kept[position]
                    return True
        return False

    def _take_header(self, wanted: list[_Wanted]) -> None:
        tag, num_bytes = self._header.tolist()
        self.target = next((one for one in wanted if one.accepts(self._rank, tag)), None)
        if self.target is not None:
            wanted.remove(self.target)
        has_room = self.target is not None and self.target.raw.numel() == num_bytes
        self._bytes = self.target.raw if self.target and has_room else torch.empty(num_bytes, dtype=torch.uint8)
        self._receiving = self._collective.recv(self._bytes, source=self._rank) if num_bytes else base.Finished()

    def _take_bytes(self, raw: Tensor, ended: list[Callable[[], None]]) -> None:
        if self.target is None:
            self._kept.append((int(self._header[0]), raw))
        else:
            self.target.end(self._rank, raw.numel(), ended)
        self.target = self._bytes = self._receiving = None


@final
class _Pause:
    """What a waiting thread does between two looks."""

    def __init__(self, yield_s: float) -> None:
        self._yield_s = yield_s
        self.start_again()

    def start_again(self) -> None:
        self._until_s = time.perf_counter() + self._yield_s
        self._sleep_s = _SHORTEST_SLEEP_S

    def __call__(self) -> None:
        if time.perf_counter() < self._until_s:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
