"""A slice of the conformance checks through `paceline.run`, with real actors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import paceline
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.records import UpdateRecord
from paceline.running.result import Result
from tests.conformance.reference import train_alone
from tests.conformance.rows import ROWS, Row, launched, prepared, step
from tests.conformance.scripts import EXACT, SCRIPTS, assert_close, train
from tests.conformance.scripts import launched as launched_reference
from tests.conformance.test_asynchrony import SLOW_S, largest_lead, train_apart, up_to
from tests.conformance.test_resume import assert_same, train_everything

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_here")]
SLOW = pytest.mark.slow
ROW = {row.name: row for row in ROWS}


def run(row: Row, program: object, out: Path, **settings: object) -> Result:
    return paceline.run(
        program,  # type: ignore[arg-type]
        strategy=row.strategy,
        workers=row.workers,
        options=row.options,
        out=out,
        **settings,  # type: ignore[arg-type]
    )


def train_and_look(worker: paceline.Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    worker.evaluation(lambda model: {"sum": sum(float(p.double().sum()) for p in model.parameters())})
    for _ in range(60):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


@pytest.mark.parametrize(
    "name",
    [
        "ps-bsp",
        *(
            pytest.param(name, marks=SLOW)
            for name in (
                "all-reduce",
                "ps-bsp-3-servers",
                "ps-bsp-backup",
                "ps-asp",
                "ps-bsp-sign",
            )
        ),
    ],
)
def test_run_keeps_its_promises(name: str, tmp_path: Path) -> None:
    """Budget, cadence, records and files together."""
    row = ROW[name]
    program = partial(launched, train_and_look, tmp_path)
    result = run(row, program, tmp_path / "run", max_steps=22, eval_every=10, checkpoint_every=8)
    assert result.iteration == 22
    judged = [evaluation.iteration for evaluation in result.evaluations]
    assert (judged[0], judged[-1]) == (0, 22)
    if not row.is_judged_beside:
        assert judged == [0, 10, 20, 22]
    total = sum(float(tensor.double().sum()) for tensor in result.model_state().values())
    assert result.metrics["sum"] == pytest.approx(total, rel=1e-12)
    checkpoint = Checkpoint.decode((tmp_path / "run" / FILE_NAME).read_bytes(), where="")
    assert checkpoint.iteration == 22
    for worker in range(row.workers):
        own = [record.step for record in result.steps if record.worker == worker]
        assert own == list(range(1, len(own) + 1))
        assert [record.step for record in result.logged if record.worker == worker] == own
    gradients_an_update = 1 if not row.updates_are_joint else row.workers - int(row.drops_gradients)
    for server in range(row.num_servers):
        updates: list[UpdateRecord] = [update for update in result.updates if update.server == server]
        assert len(updates) == 22 * gradients_an_update
    assert {event.name for event in result.events} >= {"started", "training", "checkpoint"}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("all-reduce", "clip by norm, uneven tail"),
        pytest.param("ps-bsp", "clip by norm, uneven tail", marks=SLOW),
        pytest.param("ps-bsp-3-servers", "one-cycle schedule, betas", marks=SLOW),
    ],
)
def test_workers_equal_one_process(name: str, case: str, tmp_path: Path) -> None:
    script, tolerance = SCRIPTS[case]
    result = run(ROW[name], partial(launched_reference, script), tmp_path / "run")
    assert_close(result.model_state(), train_alone(script, 2), tolerance)


@pytest.mark.parametrize("name", ["ps-bsp", pytest.param("ps-bsp-3-servers", marks=SLOW)])
def test_optimizer_defined_in_the_script(name: str, tmp_path: Path) -> None:
    """Servers get the class from the function itself, not from a module that they can import."""

    class SignSGD(torch.optim.Optimizer):
        def __init__(self, params: object, lr: float) -> None:
            super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign() * group["lr"])

    script = partial(train, optimizer=partial(SignSGD, lr=0.01))
    result = run(ROW[name], partial(launched_reference, script), tmp_path / "run")
    assert_close(result.model_state(), train_alone(script, 2), EXACT)


@SLOW
@pytest.mark.parametrize("name", ["gossip-int8", "diloco-int8"])
def test_what_codecs_keep_is_resumed(name: str, tmp_path: Path) -> None:
    program = partial(launched, train_everything, tmp_path)
    whole = run(ROW[name], program, tmp_path / "whole", max_steps=12)
    run(ROW[name], program, tmp_path / "begun", max_steps=5)
    resumed = run(ROW[name], program, tmp_path / "resumed", max_steps=12, resume=tmp_path / "begun")
    ends = [Checkpoint.decode((result.directory / FILE_NAME).read_bytes(), where="") for result in (resumed, whole)]
    assert_same(*ends)


@SLOW
@pytest.mark.parametrize("name", ["ps-bsp-3-servers"])
def test_run_resumes_in_place(name: str, tmp_path: Path) -> None:
    program = partial(launched, train_everything, tmp_path)
    whole = run(ROW[name], program, tmp_path / "whole", max_steps=30, eval_every=10)
    run(ROW[name], program, tmp_path / "begun", max_steps=13, eval_every=10)
    resumed = paceline.run(
        program,
        strategy=ROW[name].strategy,
        workers=2,
        options=ROW[name].options,
        max_steps=30,
        eval_every=10,
        resume=tmp_path / "begun",
    )
    assert resumed.directory == tmp_path / "begun"
    ends = [Checkpoint.decode((result.directory / FILE_NAME).read_bytes(), where="") for result in (resumed, whole)]
    assert_same(*ends)
    for worker in range(2):
        steps = [[s.step for s in result.steps if s.worker == worker] for result in (resumed, whole)]
        assert steps[0] == steps[1] == list(range(1, 31))
    assert resumed.samples == whole.samples


@SLOW
def test_stale_synchronous_run_with_a_slow_worker(tmp_path: Path) -> None:
    row = Row("ps-ssp", "ps-ssp", 3, {"staleness": 2, "servers": 2})
    script = partial(train_apart, goal=partial(up_to, 2), slow_s=SLOW_S)
    result = run(row, partial(launched, script, tmp_path), tmp_path / "run")
    assert [largest_lead(result, server, 3) for server in range(2)] == [2, 2]
