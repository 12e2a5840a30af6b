"""Which operations all ranks of a process set have asked for: matched by name, in whatever order ranks ask.

Pure. In every round each rank says what is new, all hear the same, and so all come to the same decision: there is no
coordinator. What has been agreed on once has a number afterwards, and all numbers of a round are bits of one word. The
response cache of Horovod's coordinator has the same purpose (Sergeev & Del Balso, 2018). What all ranks have asked for
alike is due where their words agree, which costs the same for one operation as for a thousand.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from paceline.horovod.requests import ALLREDUCE, BARRIER, Request, difference

_MOST_AGREED, _MOST_SAID = 256, 64
"""Rounds whose outcome is kept, and those of which it is kept what this rank has said."""


@final
class News(NamedTuple):
    """What one rank says in a round."""

    known: int = 0
    """Requests that have been agreed on before: a bit for each number."""
    requests: tuple[Request, ...] = ()
    has_joined: bool = False
    """The rank has no more data: zeros stand for what it does not ask for, until all have joined."""
    is_leaving: bool = False

    def as_plain(self) -> tuple[Any, ...]:
        """Plain data, to travel."""
        return (self.known, tuple(each.as_plain() for each in self.requests), self.has_joined, self.is_leaving)

    @classmethod
    def from_plain(cls, said: tuple[Any, ...]) -> "News":
        known, requests, has_joined, is_leaving = said
        return cls(known, tuple(map(Request.from_plain, requests)), has_joined, is_leaving)


@final
class Ready(NamedTuple):
    """One operation that is due now on every rank."""

    request: Request
    """As the first rank that takes part asked for it."""
    error: str | None
    """Why it cannot be done, if ranks do not agree."""
    joined: frozenset[int]
    """Ranks that take part with zeros."""


@final
class Due(NamedTuple):
    """What every rank does after a round: first what is called by numbers, then the rest."""

    numbers: int = 0
    """A bit for each of `agreed`; the same bits mean the same for as long as the ranks live."""
    agreed: tuple[Ready, ...] = ()
    others: tuple[Ready, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.others)


@final
class Negotiator:
    """What the ranks of one process set have asked for so far.

    A request that all ranks make alike is `shared`: a bit in each rank's word, until it stands in all of them. Requests
    that differ, or are new, or wait beside ranks that have joined, are looked at one by one, by name. A name goes one
    way or the other. A group of tensors is one request, remembered as one.

    Args:
        ranks: the set's ranks as the script counts them, for errors.
        num_remembered: tensors whose requests are called by a number.
    """

    def __init__(self, ranks: Sequence[int], *, num_remembered: int = 8192) -> None:
        self._ranks = tuple(ranks)
        self._room = num_remembered  # for so many tensors more
        self._numbers: dict[Request, int] = {}
        self._latest: dict[str, tuple[Request, int]] = {}  # by name, so that the same object is found without a hash
        self._remembered: list[Request] = []
        self._said: dict[str, tuple[list[Request], int]] = {}  # by the first one's name: the last ones, and their bits
        self._num_forms: dict[str, int] = {}  # by name, how many remembered requests have it
        self._shared: dict[str, int] = {}  # by name, numbers that all ranks have asked for alike
        self._shared_bits = 0
        self._words = [0] * len(self._ranks)  # what each rank has asked for, of the shared ones
        self._single_bits = 0  # of the shared ones, those that are looked at one by one now
        self._agreed: dict[int, tuple[Ready, ...]] = {}
        self._asked: dict[str, dict[int, Request]] = {}  # one by one, in the order of the first who asked
        self._joined: list[int] = []  # in the order of joining
        self.is_leaving: set[int] = set()
        """Ranks that have said that they leave."""

    def news(self, requests: list[Request], *, has_joined: bool = False, is_leaving: bool = False) -> News:
        """What a rank says of these requests."""
        first = requests[0].name if requests else ""
        said, known = self._said.get(first, (None, 0))
        if requests == said:  # as in the step before: of a thousand this takes 6 us, and looking up each one 160
            return News(known, (), has_joined, is_leaving)
        known, new = 0, []
        for request in requests:
            latest = self._latest.get(request.name)
            if latest is not None and latest[0] is request:
                known |= 1 << latest[1]
                continue
            number = self._numbers.get(request)
            if number is None:
                new.append(request)
            else:
                self._latest[request.name] = (request, number)
                known |= 1 << number
        if not new:
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said[first] = requests, known
        return News(known, tuple(new), has_joined, is_leaving)

    def hear(self, everyone: Sequence[News]) -> Due:
        """What is due now, in the order in which every rank does it."""
        for rank, news in enumerate(everyone):
            if news.has_joined and rank not in self._joined:
                self._joined.append(rank)
            if news.is_leaving:
                self.is_leaving.add(rank)
        if self._joined:  # who has joined takes part in what it has not asked for, so that words do not tell
            for word in self._words:
                for number in _places(word):
                    self._single_out(self._remembered[number].name)
        for rank, news in enumerate(everyone):
            shared = 0 if self._joined else news.known & self._shared_bits & ~self._single_bits
            self._words[rank] |= shared
            for number in _places(news.known & ~shared):
                self._ask(self._remembered[number], rank)
            for request in news.requests:
                self._ask(request, rank)
        numbers = self._take_shared()
        return Due(numbers, self._agreed_on(numbers), self._take_others() if self._asked else ())

    def _ask(self, request: Request, rank: int) -> None:
        if request.name not in self._asked:
            self._asked[request.name] = {}
            self._single_out(request.name)
        self._asked[request.name][rank] = request

    def _single_out(self, name: str) -> None:
        """Look at the name one by one, whoever has asked already."""
        if name not in self._shared:
            return
        number = self._shared[name]
        self._single_bits |= 1 << number
        for rank, word in enumerate(self._words):
            if word >> number & 1:
                self._words[rank] = word & ~(1 << number)
                self._asked.setdefault(name, {})[rank] = self._remembered[number]

    def _take_shared(self) -> int:
        """The bits that stand in all ranks' words; taken out of them."""
        due = functools.reduce(operator.and_, self._words)
        self._words = [word & ~due for word in self._words]
        return due

    def _agreed_on(self, numbers: int) -> tuple[Ready, ...]:
        found = self._agreed.get(numbers)
        if found is None:
            if len(self._agreed) >= _MOST_AGREED:
                self._agreed.clear()
            found = tuple(Ready(self._remembered[number], None, frozenset()) for number in _places(numbers))
            self._agreed[numbers] = found
        return found

    def _take_others(self) -> tuple[Ready, ...]:
        """What is complete of what is looked at one by one."""
        ready = []
        for name in [name for name, asked in self._asked.items() if self._is_complete(asked)]:
            ready.append(self._ready(self._asked.pop(name)))
            if name in self._shared:
                self._single_bits &= ~(1 << self._shared[name])
        return tuple(ready)

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
        singly = {
            name: [self._ranks[rank] for rank in everybody if rank not in asked and rank not in self._joined]
            for name, asked in self._asked.items()
        }
        anybody = 0
        for word in self._words:
            anybody |= word
        shared = {
            self._remembered[number].name: [
                self._ranks[rank] for rank in everybody if not self._words[rank] >> number & 1
            ]
            for number in _places(anybody)
        }
        return {**shared, **singly}

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
            if not joined and first.name not in self._shared and len(set(asked.values())) == 1:
                self._share(first)
        return Ready(first, error, joined)

    def _remember(self, request: Request) -> None:
        if not request.is_lasting or request in self._numbers or len(request.shown) > self._room:
            return
        forms = self._num_forms.get(request.name, 0)
        if forms < 2 * len(self._ranks):  # a tensor that has another shape each time is not to use up all numbers
            self._num_forms[request.name] = forms + 1
            self._room -= len(request.shown)
            self._numbers[request] = len(self._remembered)
            self._remembered.append(request)

    def _share(self, request: Request) -> None:
        """All ranks have asked for the same. A name's first such request counts; others are looked at one by one."""
        number = self._numbers.get(request)
        if number is not None:
            self._shared[request.name] = number
            self._shared_bits |= 1 << number

    def _disagreement(self, asked: dict[int, Request], ranks: Sequence[int]) -> str | None:
        """How the first rank that asks for something else differs from the first of all."""
        first = asked[ranks[0]]
        for rank in ranks[1:]:
            found = difference(first, asked[rank])
            if found is not None:
                name, what, mine, theirs = found
                return (
                    f"{first.kind} of {name!r}: {what} is {_text(mine)} on rank {self._ranks[ranks[0]]} "
                    f"and {_text(theirs)} on rank {self._ranks[rank]}"
                )
        return None


def _places(bits: int) -> Iterator[int]:
    """Where ones stand, from the lowest."""
    for place, digit in enumerate(reversed(f"{bits:b}")):
        if digit == "1":
            yield place


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
