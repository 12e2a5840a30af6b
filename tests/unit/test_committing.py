"""A worker tells servers that its push counts when all have it."""

from __future__ import annotations

from typing import Any

from paceline.server.asked_server import AskedServer
from paceline.server.committing import Committing

SAID: dict[str, Any] = {"outlives_workers": True, "is_copied_apart": True}


def begun(*, servers: int) -> tuple[Committing, list[AskedServer]]:
    asked = [AskedServer(carries_bytes=True, is_beside=index == 0, epoch=1) for index in range(servers)]
    committing = Committing(asked)
    committing.attached([SAID] * servers)
    committing.begin()
    return committing, asked


def told(committing: Committing, index: int) -> list[int]:
    return list(committing.held(index))


def test_all_are_told_when_the_last_has_it() -> None:
    committing, _ = begun(servers=3)
    assert [told(committing, index) for index in (2, 0, 1)] == [[], [], [0, 1, 2]]
    committing.begin()
    assert [told(committing, index) for index in (0, 1, 2)] == [[], [], [0, 1, 2]]


def test_whoever_takes_over_is_told_when_it_has_said_that_it_has_it() -> None:
    committing, _ = begun(servers=3)
    assert told(committing, 0) == []
    committing.moved(0)  # and is asked again, while the other two have yet to answer
    assert told(committing, 1) == []
    assert told(committing, 2) == [1, 2]
    assert told(committing, 0) == [0]
    committing.moved(1)
    committing.moved(2)
    assert told(committing, 2) == [2]
    assert told(committing, 1) == [1]


def test_one_that_does_not_know_the_worker_yet_is_not_told() -> None:
    committing, servers = begun(servers=2)
    assert told(committing, 0) == []
    committing.moved(0)
    servers[0].is_new = True
    assert told(committing, 1) == [1]
    servers[0].is_new = False
    assert told(committing, 0) == [0]
