"""A worker's end of a store: a request as a message to each server that it concerns, and what they answer.

Sans-IO.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.kv.key_cache import KeyCache
from paceline.kv.range_clocks import RangeClock
from paceline.kv.requests import Keys, Request, require_ascending, unpack_pairs, unpack_values
from paceline.kv.spec import Pairs, Spec
from paceline.messages import Kind, Message, WireError
from paceline.server.actions import Send


@dataclass
class _Open:
    """A request that is not done with."""

    kind: Kind
    due: set[int]
    """Servers that owe an answer."""
    pulled: Pairs | None
    """For a list of keys: where values are put as they come."""
    parts: dict[int, slice]
    """By server: which of them are its."""
    pairs: dict[int, Pairs] = field(default_factory=dict)
    """For a range: what each server has."""
    clocks: list[RangeClock] = field(default_factory=list)


@final
class ClientCore:
    def __init__(self, spec: Spec, worker: int) -> None:
        self.spec, self.worker = spec, worker
        self._bounds = spec.bounds
        self._caches = [KeyCache() for _ in range(spec.servers)]
        self._timestamp = 0
        self._open: dict[int, _Open] = {}

    def ask(
        self,
        kind: Kind,
        keys: Keys = range(0),
        values: Tensor | None = None,
        *,
        function: str = "add",
        within: range | None = None,
        after: Sequence[int] = (),
        clock: int = 0,
        drops: bool = False,
    ) -> tuple[int, list[Send]]:
        """The request's timestamp, and what to send. Raises UsageError, which names what is wrong, if it cannot be
        asked."""
        keys, values, within = self.checked(keys, values, within)
        for earlier in after:
            self._require_asked(earlier)
        parts = self._divided(keys)
        if kind in (Kind.PUSH_VALUES, Kind.LEAVE):
            asked = list(range(self.spec.servers))  # clocks of workers are the same everywhere
        elif kind is Kind.MEET:
            asked = [0]
        else:
            asked = [index for index, part in enumerate(parts) if part.stop > part.start]
        self._timestamp = timestamp = self._timestamp + 1
        pulled = None
        if kind is Kind.PULL_VALUES and isinstance(keys, Tensor):
            pulled = Pairs(keys, torch.empty(len(keys), self.spec.dim, dtype=self.spec.dtype))
        sends = []
        for index in asked:
            own = slice(parts[index].start, max(parts[index].stop, parts[index].start))
            request = Request(
                kind,
                self.worker,
                timestamp,
                keys[own],
                None if values is None else values[own],
                function,
                self._cut(within, index),
                [earlier for earlier in after if index in self._due(earlier)],
                clock,
                drops,
            )
            sends.append(Send(index, request.message(self._caches[index])))
        self._open[timestamp] = _Open(kind, set(asked), pulled, {index: parts[index] for index in asked})
        if not asked:
            self._close(timestamp)
        return timestamp, sends

    def checked(self, keys: Keys, values: Tensor | None, within: range | None) -> tuple[Keys, Tensor | None, range]:
        """Copies of keys and values, which their owner may change while messages are under way, and the range that the
        request is about. Raises UsageError, which names what does not fit the store."""
        spec = self.spec
        if isinstance(keys, Tensor):
            if keys.dtype is not torch.int64 or keys.dim() != 1:
                raise UsageError(f"keys are int64 in one dimension, not {keys.dtype} of shape {tuple(keys.shape)}")
            keys = keys.clone(memory_format=torch.contiguous_format)
            try:
                require_ascending(keys)
            except ValueError as error:
                raise UsageError(str(error)) from None
        elif keys.step != 1:
            raise UsageError(f"{keys} has gaps: give its keys as a tensor")
        if within is None:
            within = keys if isinstance(keys, range) else range(spec.num_keys)
        if within.step != 1 or not 0 <= within.start <= within.stop <= spec.num_keys:
            raise UsageError(f"{within} is no range of a store's {spec.num_keys} keys")
        if len(keys) and not within.start <= int(keys[0]) <= int(keys[-1]) < within.stop:
            raise UsageError(f"keys {int(keys[0])} to {int(keys[-1])} are not all within {within}")
        if values is None:
            return keys, None, within
        values = values.reshape(-1, 1) if spec.dim == 1 and values.dim() == 1 else values
        if values.shape != (len(keys), spec.dim) or values.dtype is not spec.dtype:
            raise UsageError(
                f"{len(keys)} keys have values of shape {(len(keys), spec.dim)} and {spec.dtype}, not "
                f"{tuple(values.shape)} and {values.dtype}"
            )
        return keys, values.detach().clone(memory_format=torch.contiguous_format), within

    def receive(self, index: int, answer: Message) -> None:
        """Raises UsageError for what a server refused, whoever asked for it here."""
        request = self._open.get(answer.clock)
        if request is None or index not in request.due:
            return  # it is over: another server has refused it
        if answer.kind is Kind.ERROR:
            del self._open[answer.clock]
            raise UsageError(str(answer.body.get("error", f"server {index} refused a request")))
        if answer.kind is Kind.ANSWER:
            try:
                self._take(index, request, answer)
            except (KeyError, TypeError, ValueError) as error:
                raise WireError(f"server {index} sent an answer that cannot be read: {error}") from None
        request.due.discard(index)
        if not request.due:
            self._close(answer.clock)

    def is_done(self, timestamp: int) -> bool:
        """Raises UsageError if there is no such request."""
        self._require_asked(timestamp)
        return not self._due(timestamp)

    def _require_asked(self, timestamp: int) -> None:
        if type(timestamp) is not int or not 0 < timestamp <= self._timestamp:
            raise UsageError(f"no request of worker {self.worker} has the timestamp {timestamp!r}")

    def unfinished(self) -> list[int]:
        return [timestamp for timestamp, request in self._open.items() if request.due]

    def owing(self, timestamp: int) -> str:
        """Who owes what, in words."""
        servers = ", ".join(map(str, sorted(self._due(timestamp))))
        return (
            f"server(s) {servers} owe worker {self.worker} the answer to {self._open[timestamp].kind.name} {timestamp}"
        )

    def take_pairs(self, timestamp: int) -> Pairs:
        """What a pull got, once. Raises UsageError if there is nothing."""
        request = self._taken(timestamp, Kind.PULL_VALUES)
        if request.pulled is not None:
            return request.pulled
        some = [request.pairs[index] for index in sorted(request.pairs)]
        if not some:
            return Pairs(torch.empty(0, dtype=torch.int64), torch.empty(0, self.spec.dim, dtype=self.spec.dtype))
        return Pairs(torch.cat([each.keys for each in some]), torch.cat([each.values for each in some]))

    def take_clocks(self, timestamp: int) -> list[RangeClock]:
        return sorted(self._taken(timestamp, Kind.READ_CLOCKS).clocks)

    def _taken(self, timestamp: int, kind: Kind) -> _Open:
        request = self._open.get(timestamp)
        if request is None or request.kind is not kind:
            raise UsageError(f"request {timestamp} was no {kind.name}, or its answer has been taken already")
        return self._open.pop(timestamp)

    def _due(self, timestamp: int) -> set[int]:
        request = self._open.get(timestamp)
        return request.due if request is not None else set()

    def _close(self, timestamp: int) -> None:
        if self._open[timestamp].kind not in (Kind.PULL_VALUES, Kind.READ_CLOCKS):
            del self._open[timestamp]

    def _take(self, index: int, request: _Open, answer: Message) -> None:
        if request.kind is Kind.READ_CLOCKS:
            request.clocks += [RangeClock(start, stop, dict(clocks)) for start, stop, *clocks in answer.body["clocks"]]
        elif request.pulled is not None:
            unpack_values(answer.body, answer.payload, request.pulled.values[request.parts[index]])
        else:
            request.pairs[index] = unpack_pairs(answer.body, answer.payload, self.spec)

    def _divided(self, keys: Keys) -> list[slice]:
        """Which of the keys each server owns; empty, or of no length, for those that own none."""
        if isinstance(keys, Tensor):
            ends = torch.searchsorted(keys, torch.tensor(self._bounds[1:-1], dtype=torch.int64)).tolist()
            ends = [0, *ends, len(keys)]
        else:
            ends = [min(max(bound - keys.start, 0), len(keys)) for bound in self._bounds]
        return [slice(start, stop) for start, stop in pairwise(ends)]

    def _cut(self, keys: range, index: int) -> range:
        low, high = self._bounds[index : index + 2]
        start = min(max(keys.start, low), high)
        return range(start, max(start, min(keys.stop, high)))
