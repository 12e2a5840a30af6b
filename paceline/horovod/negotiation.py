"""Which operations all ranks of a process set have asked for: matched by name, in whatever order ranks ask.

Pure. In every round each rank says what is new, all hear the same, and so all come to the same decision: there is no
coordinator. What has been agreed on once is called by a number afterwards (Sergeev & Del Balso, 2018, describe the
coordinator that this replaces; its response cache has the same purpose).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, final

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, MEETING = (
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "meeting",
)
_ALIKE = {ALLREDUCE: "shape", REDUCESCATTER: "shape", BROADCAST: "shape", ALLGATHER: "rest", ALLTOALL: "rest"}
"""What of a shape must agree: all of it, or all but the first dimension."""


@final
@dataclass(frozen=True)
class Request:
    """What a rank asks for."""

    kind: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    device: str = "cpu"
    group: str = ""
    """Requests of one group are taken up together; empty: the request is on its own."""
    group_size: int = 1
    is_lasting: bool = True
    """Whether the same is likely to be asked for again; a name that was made up for one call is not."""


@final
class News(NamedTuple):
    """What one rank says in a round."""

    numbers: tuple[int, ...] = ()
    """Requests that have been agreed on before."""
    requests: tuple[Request, ...] = ()
    has_joined: bool = False
    """The rank has no more data: zeros stand for what it does not ask for, until all have joined."""
    is_leaving: bool = False

    def as_plain(self) -> tuple[Any, ...]:
        """Plain data, to travel."""
        requests = tuple(tuple(getattr(each, field.name) for field in fields(each)) for each in self.requests)
        return (self.numbers, requests, self.has_joined, self.is_leaving)

    @classmethod
    def from_plain(cls, said: tuple[Any, ...]) -> "News":
        numbers, requests, has_joined, is_leaving = said
        return cls(numbers, tuple(Request(*values) for values in requests), has_joined, is_leaving)


@final
class Ready(NamedTuple):
    """One operation that is due now on every rank."""

    request: Request
    """As the first rank that takes part asked for it."""
    error: str | None
    """Why it cannot be done, if ranks do not agree."""
    joined: frozenset[int]
    """Ranks that take part with zeros."""
    shapes: tuple[tuple[int, ...], ...]
    """What each rank that asked for it gives, in rank order."""


@final
class Negotiator:
    """What the ranks of one process set have asked for so far.

    Args:
        ranks: the set's ranks as the script counts them, for errors.
        num_remembered: requests that are called by a number.
    """

    def __init__(self, ranks: Sequence[int], *, num_remembered: int = 1024) -> None:
        self._ranks = tuple(ranks)
        self._num_remembered = num_remembered
        self._numbers: dict[Request, int] = {}
        self._remembered: list[Request] = []
        self._asked: dict[str, dict[int, Request]] = {}  # by name, in the order of the first who asked
        self._joined: list[int] = []  # in the order of joining
        self.is_leaving: set[int] = set()
        """Ranks that have said that they leave."""

    def news(self, requests: Iterable[Request], *, has_joined: bool = False, is_leaving: bool = False) -> News:
        """What a rank says of these requests."""
        numbers, new = [], []
        for request in requests:
            number = self._numbers.get(request)
            if number is None:
                new.append(request)
            else:
                numbers.append(number)
        return News(tuple(numbers), tuple(new), has_joined, is_leaving)

    def hear(self, everyone: Sequence[News]) -> list[Ready]:
        """What is due now, in the order in which every rank does it."""
        for rank, news in enumerate(everyone):
            for request in (*(self._remembered[number] for number in news.numbers), *news.requests):
                self._asked.setdefault(request.name, {})[rank] = request
            if news.has_joined and rank not in self._joined:
                self._joined.append(rank)
            if news.is_leaving:
                self.is_leaving.add(rank)
        due = [name for name, asked in self._asked.items() if self._is_complete(asked)]
        sizes: dict[str, int] = {}
        for name in due:
            request = next(iter(self._asked[name].values()))
            sizes[request.group] = sizes.get(request.group, 0) + 1
        ready = []
        for name in due:
            request = next(iter(self._asked[name].values()))
            if request.group and sizes[request.group] < request.group_size:
                continue
            ready.append(self._ready(self._asked.pop(name)))
        failed = {each.request.group: each.error for each in ready if each.request.group and each.error}
        return [each._replace(error=failed.get(each.request.group, each.error)) for each in ready] if failed else ready

    def last_joined(self) -> int | None:
        """Once all have joined, the rank that came last; all begin anew then."""
        if len(self._joined) < len(self._ranks):
            return None
        last = self._ranks[self._joined[-1]]
        self._joined.clear()
        return last

    def missing(self) -> dict[str, list[int]]:
        """Ranks that have not asked yet for what others wait for, by name."""
        everybody = range(len(self._ranks))
        return {
            name: [self._ranks[rank] for rank in everybody if rank not in asked and rank not in self._joined]
            for name, asked in self._asked.items()
        }

    def _is_complete(self, asked: dict[int, Request]) -> bool:
        return all(rank in asked or rank in self._joined for rank in range(len(self._ranks)))

    def _ready(self, asked: dict[int, Request]) -> Ready:
        ranks = sorted(asked)
        first = asked[ranks[0]]
        joined = frozenset(set(range(len(self._ranks))) - set(ranks))
        error = self._disagreement(asked, ranks)
        if error is None and joined and first.kind not in (ALLREDUCE, BARRIER):
            gone = ", ".join(str(self._ranks[rank]) for rank in sorted(joined))
            error = f"{first.kind} of {first.name!r}: rank {gone} has joined, and only allreduce takes zeros for it"
        if error is None:
            for request in asked.values():
                self._remember(request)
        return Ready(first, error, joined, tuple(asked[rank].shape for rank in ranks))

    def _remember(self, request: Request) -> None:
        if request.is_lasting and request not in self._numbers and len(self._remembered) < self._num_remembered:
            self._numbers[request] = len(self._remembered)
            self._remembered.append(request)

    def _disagreement(self, asked: dict[int, Request], ranks: Sequence[int]) -> str | None:
        """How the first rank that asks for something else differs from the first of all."""
        first = asked[ranks[0]]
        for rank in ranks[1:]:
            other = asked[rank]
            for what in ("kind", "dtype", "shape", "op", "prescale", "postscale", "root", "device", "group_size"):
                mine, theirs = getattr(first, what), getattr(other, what)
                if what == "shape" and _ALIKE.get(first.kind) != "shape":
                    mine, theirs = _rest(mine), _rest(theirs)
                if mine != theirs:
                    shown = (first.shape, other.shape) if what == "shape" else (mine, theirs)
                    return (
                        f"{first.kind} of {first.name!r}: {what} is {_text(shown[0])} on rank {self._ranks[ranks[0]]} "
                        f"and {_text(shown[1])} on rank {self._ranks[rank]}"
                    )
        return None


def _rest(shape: tuple[int, ...]) -> tuple[int, ...]:
    """All but the first dimension, and how many there are."""
    return (len(shape), *shape[1:])


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
