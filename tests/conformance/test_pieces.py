"""Servers of other hosts, whose shards are small pieces: the same training, whichever piece arrives when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.comm.servers import group as server_group
from paceline.errors import UsageError
from paceline.server import client_core, server_core, windows
from paceline.server.windows import LEAST_ANSWERS, AnswerWindow
from paceline.strategies.parameter_server import ParameterServer
from tests.conformance import local_engine
from tests.conformance.reference import train_alone
from tests.conformance.rows import NUM_SAMPLES, loader_of, prepared, problem, step
from tests.conformance.scripts import EXACT, SCRIPTS, assert_close

PIECE_BYTES = 64


def in_small_pieces(script: Callable[[Any], Any]) -> None:
    server_group.FRAME_BYTES = client_core.FRAME_BYTES = PIECE_BYTES
    script(paceline.init())


def whole(script: Callable[[Any], Any]) -> None:
    script(paceline.init())


def train(worker: Any) -> None:
    model, optimizer, loader = prepared(worker)
    for _ in range(3):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


def train_adam(worker: Any) -> None:
    model = torch.nn.Linear(10, 40)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = worker.prepare(model, optimizer, loader_of(problem()))
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


@pytest.mark.parametrize("num_servers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "case",
    [
        "adam",
        "clip by norm, uneven tail",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("normalised sgd of the script's own", "one-cycle schedule, momentum", "mixed dtypes")
        ),
    ],
)
def test_pieces_equal_one_process(case: str, num_servers: int, tmp_path: Path) -> None:
    script, tolerance = SCRIPTS[case]
    result = local_engine.run(
        partial(in_small_pieces, script),
        strategy="ps-bsp",
        options={"servers": num_servers},
        workers=2,
        out=tmp_path,
        servers_are_local=False,
    )
    assert_close(result.model_state(), train_alone(script, 2), tolerance)
    updates = [(update.server, update.iteration, update.worker) for update in result.updates]
    assert len(updates) == len(set(updates)) == 2 * num_servers * result.iteration, "one record a server, not a piece"


def test_checkpoints_do_not_show_the_pieces(tmp_path: Path) -> None:
    states = []
    for name, program, servers_are_local in (("pieces", in_small_pieces, False), ("whole", whole, True)):
        settings: dict[str, Any] = {"strategy": "ps-bsp", "options": {"servers": 2}, "workers": 2}
        out = tmp_path / name
        local_engine.run(
            partial(program, train_adam),
            out=out,
            servers_are_local=servers_are_local,
            checkpoint_every=5,
            max_steps=5,
            **settings,
        )
        again = local_engine.run(
            partial(program, train_adam),
            out=tmp_path / f"{name} resumed",
            servers_are_local=servers_are_local,
            resume=out,
            max_steps=9,
            **settings,
        )
        assert again.iteration == 9
        checkpoint = Checkpoint.decode((out / FILE_NAME).read_bytes(), where=name)
        states.append((checkpoint.optimizer, again.model_state()))
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    assert_close(states[0][0], states[1][0], tolerance)
    assert_close(states[0][1], states[1][1], tolerance)


@pytest.mark.parametrize("servers_are_local", [True, False], ids=["local", "elsewhere"])
def test_backup_workers_count_alike_at_every_server(servers_are_local: bool, tmp_path: Path) -> None:
    result = local_engine.run(
        partial(in_small_pieces, train),
        strategy="ps-bsp",
        options={"servers": 3, "backup_workers": 1},
        workers=3,
        out=tmp_path,
        servers_are_local=servers_are_local,
    )
    counted = [
        {(update.iteration, update.worker, update.clock) for update in result.updates if update.server == server}
        for server in range(3)
    ]
    assert counted[0] == counted[1] == counted[2]
    # The first worker that is through its data ends the run; by then there were as many updates as it took steps.
    assert result.iteration >= 3 * NUM_SAMPLES // 4 // 3


def test_one_worker_beside_the_servers_pushes_all_at_once_and_others_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others are answered a few pieces at a time, both together."""
    monkeypatch.setattr(server_core, "FRAME_BYTES", PIECE_BYTES)
    monkeypatch.setattr(windows, "UNDER_WAY_S", 0.0)  # as if all links were slow
    answered_at_once: list[int] = []
    take = AnswerWindow.take

    def noted(window: AnswerWindow[Any], now_s: float) -> Iterator[Any]:
        yield from take(window, now_s)
        answered_at_once.append(window.under_way.total())

    monkeypatch.setattr(AnswerWindow, "take", noted)
    script, tolerance = SCRIPTS["one-cycle schedule, momentum"]
    result = local_engine.run(
        partial(in_small_pieces, script),
        strategy="ps-bsp",
        options={"servers": 2},
        workers=3,
        out=tmp_path,
        servers_are_local=[0],
    )
    assert_close(result.model_state(), train_alone(script, 3), tolerance)
    assert 0 < max(answered_at_once) <= LEAST_ANSWERS


@pytest.mark.parametrize("servers_are_local", [False, [0]], ids=["elsewhere", "of one worker"])
@pytest.mark.parametrize(
    ("strategy", "options"), [("ps-ssp", {"staleness": 0}), ("ps-ssp", {"staleness": 1}), ("ps-asp", {})]
)
def test_asynchronous_pieces_apply_every_gradient(
    strategy: str, options: dict[str, Any], servers_are_local: bool | list[int], tmp_path: Path
) -> None:
    result = local_engine.run(
        partial(in_small_pieces, train),
        strategy=strategy,
        options={"servers": 2, **options},
        workers=2,
        out=tmp_path,
        servers_are_local=servers_are_local,
        checkpoint_every=10,
    )
    assert result.iteration == 3 * NUM_SAMPLES // 4
    assert [len([u for u in result.updates if u.server == server]) for server in (0, 1)] == [result.iteration] * 2


@pytest.mark.parametrize("consistency", ["ssp", "asp"])
def test_a_lone_worker_that_reads_for_itself_reads_what_it_would_be_given(consistency: Any, tmp_path: Path) -> None:
    script, _ = SCRIPTS["adam"]
    plan = ParameterServer(consistency=consistency, servers=2, torn_reads=True)
    result = local_engine.run(partial(whole, script), strategy=plan, workers=1, out=tmp_path)
    assert_close(result.model_state(), train_alone(script, 1), EXACT)


def test_workers_that_read_for_themselves_train_together(tmp_path: Path) -> None:
    plan = ParameterServer(consistency="asp", torn_reads=True)
    result = local_engine.run(partial(whole, train), strategy=plan, workers=2, out=tmp_path)
    assert result.iteration == 3 * NUM_SAMPLES // 4
    losses = [record.value for record in result.logged]
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])


def test_torn_reads_are_refused_where_there_are_none() -> None:
    with pytest.raises(UsageError, match="torn_reads has no effect under ps-bsp"):
        ParameterServer(torn_reads=True)
