"""A worker's end of servers on other hosts: what it sends, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.comm import server_group
from paceline.comm.alone import AloneCollective
from paceline.comm.base import OptimizerSpec, Push
from paceline.comm.parameter_service import ParameterService, ServerSpec
from paceline.comm.send_window import PIECES_UNDER_WAY
from paceline.comm.server_group import ServerAddress, ServerGroup
from paceline.comm.wire import Keys
from paceline.errors import Aborted
from paceline.layout import TensorSpec, by_group
from paceline.records import NullReporter
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.shard import Shard

EPOCH = 1
NUM_PIECES = 16
FOREVER = 10**9
ENOUGH_S = 0.5  # for all that will ever be sent


@contextmanager
def group_of_one(rule: AdmissionRule) -> Iterator[ServerGroup]:
    """Worker 0, attached to a server elsewhere that holds a model of `NUM_PIECES`."""
    keys = Keys.generate()
    service = ParameterService(keys, host="127.0.0.1", index=0, epoch=EPOCH, reporter=NullReporter())
    thread = threading.Thread(target=service.serve)
    thread.start()
    group = ServerGroup(
        keys,
        servers=[ServerAddress(service.endpoint, None)],
        collective=AloneCollective(),
        configure=lambda layout, spec, ranges: service.configure(
            ServerSpec(layout, ranges[0], spec, rule, max_updates=None)
        ),
        epoch=EPOCH,
        deadline_s=60.0,
    )
    layout = by_group([TensorSpec("weight", (NUM_PIECES * 64,), torch.float32, 0)])
    spec = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
    try:
        parameters, gradients = group.allocate(layout.num_bytes), group.allocate(layout.num_bytes)
        group.attach(layout, spec, parameters, gradients)
        yield group
    finally:
        group.close()
        service.stop()
        thread.join()


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each piece that reaches a server."""
    seen: list[int] = []
    push = Shard.push

    def noted(shard: Shard, worker: int, *rest: object, **options: object) -> object:
        seen.append(worker)
        return push(shard, worker, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Shard, "push", noted)
    monkeypatch.setattr(server_group, "FRAME_BYTES", 256)
    return seen


def test_a_worker_sends_no_more_than_a_few_pieces_ahead_of_the_answers(pushed: list[int]) -> None:
    with group_of_one(BulkSynchronous(num_workers=2)) as group:
        threading.Timer(ENOUGH_S, group.abort, ["the test has seen enough"]).start()
        with pytest.raises(Aborted, match="the test has seen enough"):
            group.exchange(Push(pause_at=FOREVER))
        assert len(pushed) == PIECES_UNDER_WAY


def test_every_piece_is_sent_in_its_turn(pushed: list[int]) -> None:
    with group_of_one(BulkSynchronous(num_workers=1)) as group:
        for clock in range(3):
            assert group.exchange(Push(pause_at=FOREVER)).iteration == clock + 1
            assert len(pushed) == (clock + 1) * NUM_PIECES


def test_gradients_that_are_applied_when_they_come_are_not_kept_back(pushed: list[int]) -> None:
    """Though the answers are: a worker may not be ahead of the other one here."""
    with group_of_one(StaleSynchronous(num_workers=2, staleness=0)) as group:
        threading.Timer(ENOUGH_S, group.abort, ["the test has seen enough"]).start()
        with pytest.raises(Aborted, match="the test has seen enough"):
            group.exchange(Push(pause_at=FOREVER))
        assert len(pushed) == NUM_PIECES


def test_shards_that_follow_a_decision_are_sent_all_at_once(pushed: list[int]) -> None:
    """The last one decides; until it has, none is answered."""
    with group_of_one(BulkSynchronous(num_workers=2, backup_workers=1)) as group:
        assert group.exchange(Push(pause_at=FOREVER)).iteration == 1
        assert len(pushed) == NUM_PIECES
