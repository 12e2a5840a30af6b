"""What the exchanges of simulated elastic runs are made of, as workers hand out, commit and take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.elastic import Member
from paceline.training.elastic import Survivor
from paceline.training.joining import States
from paceline.training.sharding.dealt import Dealt
from paceline.training.sharding.part import Part, Place
from tests.gossip_replay import Batch


def write_down(monkeypatch: pytest.MonkeyPatch, written: Callable[[Member, list[Batch], dict[int, int]], None]) -> None:
    """Has `written` told of each exchange that a worker commits, and is one of by then: of all batches that it was
    handed since the one before, with their weights, and, if it has joined in it, whose state it has."""
    handed_out: dict[int, list[Batch]] = defaultdict(list)
    given_by: dict[int, int] = {}
    commit, parts, take_up = Survivor.commit, Dealt.parts, States._taken_of

    def noted(dealt: Dealt, place: Place) -> Iterator[Part]:
        for part in parts(dealt, place):
            handed_out[dealt._rank].append((list(dealt.under_way[-1].parts[dealt.place]), part.weight))
            yield part

    def committed(survivor: Survivor, **named: Any) -> bool:
        is_complete = commit(survivor, **named)
        rank = survivor._member.rank
        givers = {rank: given_by.pop(rank)} if rank in given_by else {}
        written(survivor._member, handed_out.pop(rank, []), givers)
        return is_complete

    def taken(states: States, said: list[Any]) -> Member:
        member = take_up(states, said)
        given_by[member.rank] = said[0]
        return member

    monkeypatch.setattr(States, "_taken_of", taken)
    monkeypatch.setattr(Survivor, "commit", committed)
    monkeypatch.setattr(Dealt, "parts", noted)
