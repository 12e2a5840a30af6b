"""What ranks agree on, whatever order they ask in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.horovod.negotiation import Negotiator, News, Ready
from paceline.horovod.requests import ALLGATHER, ALLREDUCE, BARRIER, BROADCAST, Member, Request


def ask(
    name: str, shape: tuple[int, ...] = (2,), kind: str = ALLREDUCE, dtype: str = "float32", **about: object
) -> Request:
    return Request(kind, name, (Member(name, dtype, shape),), **{"op": "sum", **about})  # type: ignore[arg-type]


def ask_group(name: str, *shapes: tuple[int, ...], dtype: str = "float32") -> Request:
    members = (Member(f"{name}{number}", dtype, shape) for number, shape in enumerate(shapes, 1))
    return Request(ALLREDUCE, name, tuple(members), "sum")


class Ranks:
    """A negotiator on every rank, as in a run."""

    def __init__(self, size: int) -> None:
        self.negotiators = [Negotiator(range(size)) for _ in range(size)]

    def round(self, *asked: list[Request], joined: tuple[int, ...] = ()) -> list[Ready]:
        """What is due after every rank has asked for this; the same on each, as is checked here."""
        news = [
            negotiator.news(requests, has_joined=rank in joined)
            for rank, (negotiator, requests) in enumerate(zip(self.negotiators, asked, strict=True))
        ]
        travelled = [News.from_plain(each.as_plain()) for each in news]
        assert travelled == news
        due = [negotiator.hear(travelled) for negotiator in self.negotiators]
        assert all(each == due[0] for each in due)
        return [*due[0].agreed, *due[0].others]


@given(st.data())
def test_every_operation_is_due_once_when_the_last_rank_has_asked(data: st.DataObject) -> None:
    """Any order on each rank, cut into rounds anywhere; the second time by numbers."""
    size = data.draw(st.integers(1, 4))
    names = [f"tensor {number}" for number in range(data.draw(st.integers(1, 5)))]
    ranks = Ranks(size)
    for again in range(2):
        orders = [data.draw(st.permutations(names)) for _ in range(size)]
        asked_in = {name: [0] * size for name in names}
        cuts = [data.draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2).map(sorted)) for _ in orders]
        found: dict[str, int] = {}
        for number in range(3):
            parts = []
            for rank, (order, cut) in enumerate(zip(orders, cuts, strict=True)):
                start, end = [0, *cut, len(names)][number : number + 2]
                for name in order[start:end]:
                    asked_in[name][rank] = number
                parts.append([ask(name) for name in order[start:end]])
            if again:
                assert not any(ranks.negotiators[0].news(part).requests for part in parts)
            for ready in ranks.round(*parts):
                assert ready.error is None
                assert found.setdefault(ready.request.name, number) == number
        assert found == {name: max(rounds) for name, rounds in asked_in.items()}


class Naive:
    """What is due, told from names alone, with every request in full: the twin of the words of bits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: dict[str, dict[int, Request]] = {}
        self.joined: set[int] = set()

    def hear(self, everyone: list[list[Request]], joining: set[int]) -> set[tuple[str, frozenset[int]]]:
        """Names that are due, each with the ranks that take part with zeros."""
        self.joined |= joining
        for rank, requests in enumerate(everyone):
            for request in requests:
                self.asked.setdefault(request.name, {})[rank] = request
        complete = [name for name, asked in self.asked.items() if {*asked} | self.joined == {*range(self.size)}]
        due = set()
        for name in complete:
            due.add((name, frozenset({*range(self.size)} - {*self.asked[name]})))
        for name, _ in due:
            del self.asked[name]
        if len(self.joined) == self.size:
            self.joined.clear()
        return due


FORMS = {
    "a": [ask("a")],
    "b": [ask("b", (3,)), ask("b", (4,))],  # a shape that changes
    "c": [ask("c", (1, 3), ALLGATHER), ask("c", (2, 3), ALLGATHER)],  # ranks may differ
    "g": [ask_group("g", (2,), (3,)), ask_group("g", (2,), (4,)), ask_group("g", (2,), (3,), (4,))],
    "made up": [ask("made up", is_lasting=False)],
}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_words_of_bits_say_what_names_say(data: st.DataObject) -> None:
    """Programs of three ranks, each with rounds of its own cut, shapes that change, groups in pieces, and joins."""
    size, num_rounds = 3, 12
    ranks, naive = Ranks(size), Naive(size)
    under_way: list[dict[str, Request]] = [{} for _ in range(size)]
    joined: set[int] = set()
    for _ in range(num_rounds):
        everyone = []
        for rank in range(size):
            forms = [] if rank in joined else data.draw(st.lists(st.sampled_from([*FORMS]), unique=True, max_size=4))
            drawn = [data.draw(st.sampled_from(FORMS[form])) for form in forms]
            requests = [request for request in drawn if request.name not in under_way[rank]]
            under_way[rank] |= {request.name: request for request in requests}
            everyone.append(requests)
        joining = {rank for rank in range(size) if rank not in joined and data.draw(st.integers(0, 9)) == 0}
        due = ranks.round(*everyone, joined=tuple(joined | joining))
        joined |= joining
        assert {(ready.request.name, ready.joined) for ready in due} == naive.hear(everyone, joining)
        assert len({ready.request.name for ready in due}) == len(due)
        for ready in due:
            name = ready.request.name
            mine = [under_way[rank].pop(name) for rank in range(size) if name in under_way[rank]]
            has_gone = bool(ready.joined) and ready.request.kind != ALLREDUCE
            differ = ready.request.kind == ALLREDUCE and len({each.shapes for each in mine}) > 1
            assert (ready.error is not None) == (has_gone or differ)
        if len(joined) == size:
            joined.clear()
            assert all(negotiator.last_joined() is not None for negotiator in ranks.negotiators)
        else:
            assert all(negotiator.last_joined() is None for negotiator in ranks.negotiators)
        missing = ranks.negotiators[0].missing()
        assert missing == {
            name: [rank for rank in range(size) if rank not in asked and rank not in naive.joined]
            for name, asked in naive.asked.items()
        }


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (ask("a", (2, 3)), ask("a", (3, 2)), "'a': shape is [2, 3] on rank 0 and [3, 2] on rank 1"),
        (ask("a", op="sum"), ask("a", op="mean"), "op is sum on rank 0 and mean on rank 1"),
        (ask("a"), ask("a", dtype="float64"), "'a': dtype is float32 on rank 0 and float64 on rank 1"),
        (ask("a", kind=BROADCAST, root=0), ask("a", kind=BROADCAST, root=1), "root is 0 on rank 0 and 1 on rank 1"),
        (ask("a", kind=ALLGATHER), ask("a"), "kind is allgather on rank 0 and allreduce on rank 1"),
        (ask("a", (1, 3), ALLGATHER), ask("a", (1, 4), ALLGATHER), "shape is [1, 3] on rank 0 and [1, 4] on rank 1"),
        (ask("a", prescale=0.5), ask("a"), "prescale is 0.5 on rank 0 and 1.0 on rank 1"),
        (ask_group("g", (2,), (3,)), ask_group("g", (2,), (4,)), "'g2': shape is [3] on rank 0 and [4] on rank 1"),
        (ask_group("g", (2,), (3,)), ask_group("g", (2,)), "'g': number of tensors is 2 on rank 0 and 1 on rank 1"),
    ],
)
def test_ranks_that_ask_for_different_things_are_named(first: Request, second: Request, said: str) -> None:
    ranks = Ranks(2)
    (ready,) = ranks.round([first], [second])
    assert ready.error is not None
    assert said in ready.error
    assert ranks.round([ask("b")], [ask("b")])[0].error is None


def test_lengths_may_differ_where_tensors_are_gathered() -> None:
    (ready,) = Ranks(2).round([ask("a", (1, 3), ALLGATHER)], [ask("a", (5, 3), ALLGATHER)])
    assert ready.error is None


def test_who_has_joined_is_not_waited_for_until_all_have() -> None:
    ranks = Ranks(3)
    (ready,) = ranks.round([ask("a")], [], [ask("a")], joined=(1,))
    assert ready.joined == {1}
    assert ranks.negotiators[0].last_joined() is None
    (ready,) = ranks.round([Request(BARRIER, "b")], [], [Request(BARRIER, "b")])
    assert ready.error is None
    (ready,) = ranks.round([ask("c", kind=BROADCAST)], [], [ask("c", kind=BROADCAST)])
    assert ready.error is not None
    assert "rank 1 has joined" in ready.error
    assert ranks.round([], [], [], joined=(0, 1)) == []
    assert ranks.round([], [], [], joined=(0, 1, 2)) == []
    assert [negotiator.last_joined() for negotiator in ranks.negotiators] == [2, 2, 2]
    assert ranks.round([ask("a")], [], [ask("a")]) == []


def test_missing_ranks_are_known() -> None:
    negotiator = Negotiator([0, 3, 5])
    negotiator.hear([News(requests=(ask("a"),)), News(), News()])
    assert negotiator.missing() == {"a": [3, 5]}


def test_so_many_requests_are_remembered_and_made_up_names_never() -> None:
    """A group takes the room of its tensors."""
    negotiator = Negotiator([0], num_remembered=4)
    made_up = ask("allreduce.noname.1", is_lasting=False)
    asked = [made_up, ask("a"), ask_group("g", (2,), (3,)), ask_group("h", (2,), (3,)), ask("b"), ask("c")]
    for request in asked:
        negotiator.hear([negotiator.news([request])])
    known = negotiator.news(asked)
    assert known.known == 0b111
    assert known.requests == (made_up, ask_group("h", (2,), (3,)), ask("c"))


def test_what_was_said_before_is_said_again_only_of_the_same_requests() -> None:
    """One name has another shape, one is new, one is missing, or the order differs."""
    ranks = Ranks(1)
    asked = [ask("a"), ask("b"), ask("c")]
    ranks.round(asked)
    ranks.round([ask("b", shape=(7,))])
    negotiator = ranks.negotiators[0]
    for _ in range(2):
        assert negotiator.news([*asked]) == News(0b111)
        assert negotiator.news([ask("a"), ask("b"), ask("c")]) == News(0b111)
        assert negotiator.news([ask("a"), ask("b", shape=(7,)), ask("c")]) == News(0b1101)
        assert negotiator.news([*asked, ask("d")]) == News(0b111, (ask("d"),))
        assert negotiator.news(asked[:2]) == News(0b011)
        assert negotiator.news([*reversed(asked)], has_joined=True) == News(0b111, has_joined=True)
        assert negotiator.news([]) == News()
