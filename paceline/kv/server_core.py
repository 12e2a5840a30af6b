"""A server's end of a store: a request in, answers out, to it and to earlier ones that had to wait.

Sans-IO. A request is finished when it is answered: a push, when it has become part of an update, or the rule has
dropped it. It begins when those that it names in `after` are finished (Li et al., OSDI 2014, section 3.5:
execute-after-finished dependencies) and, if it is a push or a pull, the admission rule lets the worker go on. A
worker's pushes begin in their order.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch

from paceline.errors import PacelineError
from paceline.kv.key_cache import KeyCache
from paceline.kv.range_clocks import RangeClocks
from paceline.kv.requests import EPOCH, Request, pack_pairs, pack_values
from paceline.kv.rows import Rows, united
from paceline.kv.spec import Pairs, Spec
from paceline.messages import Kind, Message, WireError
from paceline.server.actions import Send
from paceline.server.admission import ProtocolError

_RULED = frozenset({Kind.PUSH_VALUES, Kind.PULL_VALUES})
_KINDS = _RULED | {Kind.INIT_VALUES, Kind.READ_CLOCKS, Kind.MEET, Kind.LEAVE}


class _Held(NamedTuple):
    push: Request
    clock: int


@final
class ServerCore:
    """Raises UsageError if the spec's rule or functions cannot be had here."""

    def __init__(self, spec: Spec, index: int) -> None:
        self.spec, self.index = spec, index
        self.owned = range(*spec.bounds[index : index + 2])
        self.rows = Rows(spec.dim + spec.state, spec.dtype)
        self._changes = {name: spec.change(name) for name in ("add", "assign", *spec.functions)}
        self._rule = spec.admission_rule()
        self._clocks = RangeClocks(self.owned.start, self.owned.stop, self._rule.members.ranks)
        self._caches: dict[int, KeyCache] = defaultdict(KeyCache)
        self._unfinished: dict[int, set[int]] = defaultdict(set)
        self._latest: dict[int, int] = defaultdict(int)
        self._waiting: list[Request] = []
        self._held: dict[int, _Held] = {}
        self._answers: list[Send] = []

    @property
    def is_deserted(self) -> bool:
        """Whether every worker has left."""
        return not self._rule.active

    def receive(self, message: Message) -> Sequence[Send]:
        """What to send for a worker's message. One that is refused is the worker's trouble alone."""
        worker = message.sender
        try:
            if message.kind not in _KINDS:
                raise WireError(f"refused {message.kind.name} of worker {worker}: it is no request to a store")
            if worker not in self._rule.active or message.clock <= self._latest[worker]:
                raise WireError(
                    f"refused {message.kind.name} {message.clock} of worker {worker}: it is none of the store's, has "
                    "left, or was connected before; a worker's number serves for one connection"
                )
            request = Request.of(message, self.spec, self._caches[worker], self.owned)
            if request.function not in self._changes:
                raise WireError(f"there is no function {request.function!r}; known are {', '.join(self._changes)}")
        except PacelineError as error:
            self._answer(worker, message.clock, Kind.ERROR, {"error": self._text(error)})
        else:
            self._latest[worker] = request.timestamp
            self._unfinished[worker].add(request.timestamp)
            self._waiting.append(request)
            self._go_on()
        answers, self._answers = self._answers, []
        return answers

    def _go_on(self) -> None:
        """Begin whatever may begin, in the order of arrival."""
        while request := next((each for each in self._waiting if self._may_begin(each)), None):
            self._waiting.remove(request)
            try:
                self._begin(request)
            except (Exception, SystemExit) as error:  # the rule is the user's, too
                if request.worker in self._held and self._held[request.worker].push is request:
                    del self._held[request.worker]
                self._finish(request, Kind.ERROR, {"error": self._text(error)})

    def _may_begin(self, request: Request) -> bool:
        worker = request.worker
        if not self._unfinished[worker].isdisjoint(request.after):
            return False
        if request.kind is Kind.LEAVE:
            return request.drops or all(each is request or each.worker != worker for each in self._waiting)
        if request.kind is Kind.MEET:
            return self._rule.active <= {each.worker for each in self._waiting if each.kind is Kind.MEET}
        if request.kind in _RULED and not self._rule.is_admitted(worker):
            return False
        if request.kind is Kind.PUSH_VALUES and (worker in self._held or self._next_push(worker) is not request):
            return False  # pushes keep their order, so that all servers count them alike
        return not request.clock or self._clocks.slowest(*_hull(request), self._rule.active) >= request.clock

    def _next_push(self, worker: int) -> Request:
        return next(each for each in self._waiting if each.worker == worker and each.kind is Kind.PUSH_VALUES)

    def _begin(self, request: Request) -> None:
        match request.kind:
            case Kind.PUSH_VALUES:
                self._push(request)
            case Kind.PULL_VALUES:
                self._pull(request)
            case Kind.INIT_VALUES:
                self._initialise(request)
            case Kind.READ_CLOCKS:
                ranges = self._clocks.within(*_hull(request))
                found = [[start, stop, *map(list, clocks.items())] for start, stop, clocks in ranges]
                self._finish(request, Kind.ANSWER, {"clocks": found})
            case Kind.LEAVE:
                self._waiting = [each for each in self._waiting if each.worker != request.worker]
                self._finish(request, Kind.OK)
                self._update(self._rule.leave(request.worker))
            case _:  # all meet
                met = [each for each in self._waiting if each.kind is Kind.MEET]
                self._waiting = [each for each in self._waiting if each.kind is not Kind.MEET]
                for each in [request, *met]:
                    self._finish(each, Kind.OK)

    def _push(self, request: Request) -> None:
        worker = request.worker
        clock = self._rule.clock_of(worker)
        self._held[worker] = _Held(request, clock)
        self._update(self._rule.push(worker, clock))
        if worker in self._held and self._held[worker].push is request and not self._rule.is_held(worker):
            self._finish(self._held.pop(worker).push, Kind.OK)  # dropped: it came too late for its clock

    def _update(self, contributors: Sequence[int]) -> None:
        while contributors:
            held = [self._held.pop(worker) for worker in contributors]
            by_function: dict[str, list[Request]] = defaultdict(list)
            for push, clock in held:
                by_function[push.function].append(push)
                self._clocks.advance(push.within.start, push.within.stop, push.worker, clock + 1)
            for name, pushes in by_function.items():
                self._change(name, pushes)
            contributors = self._rule.due()

    @torch.no_grad()
    def _change(self, name: str, pushes: Sequence[Request]) -> None:
        """One change, by the sum of what was pushed. If the user's function fails, nothing has changed."""
        pushed = united([_pairs(push) for push in pushes])
        try:
            if name in self.spec.functions and self.spec.functions[name].over_range:
                start = min(push.within.start for push in pushes)
                stop = max(push.within.stop for push in pushes)
                stored = self.rows.between(start, stop).keys
                pushed = united([pushed, Pairs(stored, pushed.values.new_zeros(len(stored), self.spec.dim))])
            rows = self.rows.read(pushed.keys)
            self._changes[name](rows, pushed.values)
            self.rows.write(pushed.keys, rows)
        except (Exception, SystemExit) as error:
            for push in pushes:
                text = f"function {name!r} raised {type(error).__name__}: {error}"
                self._finish(push, Kind.ERROR, {"error": f"server {self.index}: {text}"})
        else:
            for push in pushes:
                self._finish(push, Kind.OK)

    def _pull(self, request: Request) -> None:
        if isinstance(request.keys, range):
            keys, rows = self.rows.between(request.keys.start, request.keys.stop)
            values = rows[:, : self.spec.dim].clone(memory_format=torch.contiguous_format)  # sent while rows change
            body, payload = pack_pairs(Pairs(keys, values))
        else:
            body, payload = pack_values(self.rows.read(request.keys)[:, : self.spec.dim].contiguous())
        self._finish(request, Kind.ANSWER, body, payload)

    def _initialise(self, request: Request) -> None:
        """Keys that hold something already are left alone."""
        keys, values = _pairs(request)
        is_new = self.rows.missing(keys)
        rows = values.new_zeros(int(is_new.sum()), self.spec.dim + self.spec.state)
        rows[:, : self.spec.dim] = values[is_new]
        self.rows.write(keys[is_new], rows)
        self._finish(request, Kind.OK)

    def _finish(self, request: Request, kind: Kind, body: Any = None, payload: Sequence[Any] = ()) -> None:
        self._unfinished[request.worker].discard(request.timestamp)
        self._answer(request.worker, request.timestamp, kind, body or {}, payload)

    def _answer(self, worker: int, timestamp: int, kind: Kind, body: Any, payload: Sequence[Any] = ()) -> None:
        size = sum(map(len, payload))
        self._answers.append(
            Send(worker, Message(kind, EPOCH, worker, clock=timestamp, tensor_bytes=size, body=body, payload=payload))
        )

    def _text(self, error: BaseException) -> str:
        kind = "" if isinstance(error, WireError | ProtocolError) else f"{type(error).__name__}: "
        return f"server {self.index}: {kind}{error}"[:4000]


def _pairs(request: Request) -> Pairs:
    assert request.values is not None
    keys = request.keys
    return Pairs(torch.arange(keys.start, keys.stop) if isinstance(keys, range) else keys, request.values)


def _hull(request: Request) -> tuple[int, int]:
    keys = request.keys
    if isinstance(keys, range):
        return keys.start, keys.stop
    return int(keys[0]), int(keys[-1]) + 1
