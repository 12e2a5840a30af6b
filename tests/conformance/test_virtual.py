"""What only the virtual engine promises: the same run bit for bit, workers apart in one process, and clean ends."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import paceline
from paceline.engines.standing import Progress
from paceline.engines.virtual.network.collective import VirtualCollective
from paceline.errors import RunFailed, UsageError
from paceline.running.launch import Quiet
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import keep, kept, loader_of, network, prepared, problem, step, train
from tests.conformance.virtual_cluster import SCRIPT, STEP_S, cluster_of, run, tiny
from tests.distributed.local import Listener

SAVING_S = 1.0

# --- determinism -----------------------------------------------------------------------------------------------------


def train_with_noise(worker: Worker, out: Path) -> None:
    model = nn.Sequential(network(), nn.Dropout(0.2), nn.BatchNorm1d(4))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    worker.evaluation(lambda given: {"draw": float(torch.rand(1))})
    for x, y, _ in loader:
        worker.log(noise=random.random() + float(np.random.standard_normal()) + float(torch.rand(1)))
        step(worker, model, optimizer, x, y)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("all-reduce", {}), ("ps-asp", {"servers": 2}), ("ps-bsp", {"backup_workers": 1, "servers": 2})],
)
def test_the_same_seed_gives_the_same_run_bit_for_bit(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    cluster = cluster_of(gbit_per_s=0.01, distribution="exponential", pauses_per_hour=36000.0, pause_s=0.02)

    def content(name: str, seed: int) -> dict[str, bytes]:
        run(train_with_noise, tmp_path / name, strategy, 4, cluster=cluster, eval_every=3, seed=seed, options=options)
        files = sorted((tmp_path / name / "run").iterdir())
        return {path.name: path.read_bytes() for path in files if path.suffix != ".pt"}

    first = content("first", 7)
    torch.rand(3), random.random(), np.random.rand()
    assert len(first) >= 5
    assert content("again", 7) == first
    assert content("other", 8) != first


def draw(worker: Worker, out: Path) -> None:
    """Draws of every generator, with waits in between, in which other workers draw."""
    model, optimizer, loader = prepared(worker)
    drawn = []
    for x, y, _ in loader:
        drawn.append([random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(1))])
        step(worker, model, optimizer, x, y)
    keep(out, f"drawn-{worker.rank}", drawn)


def test_random_state_is_each_workers_own(tmp_path: Path) -> None:
    """In whatever order workers run, each draws the same."""
    before = torch.get_rng_state()
    run(draw, tmp_path / "two", "all-reduce", 2, cluster=cluster_of())
    run(draw, tmp_path / "asynchronous", "ps-asp", 2, cluster=cluster_of(distribution="exponential"))
    for rank in range(2):
        assert kept(tmp_path / "two", f"drawn-{rank}") == kept(tmp_path / "asynchronous", f"drawn-{rank}")
    assert kept(tmp_path / "two", "drawn-0") != kept(tmp_path / "two", "drawn-1")
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_stay_on_while_others_have_them_off(tmp_path: Path) -> None:
    """Rank 0 waits inside no_grad, where others compute."""

    def script(worker: Worker, out: Path) -> None:
        if worker.rank == 0:
            with torch.no_grad():
                worker.barrier()
                assert not torch.is_grad_enabled()
            return
        assert torch.is_grad_enabled()
        torch.ones(1, requires_grad=True).sum().backward()
        worker.barrier()

    run(script, tmp_path, "all-reduce", 2, cluster=cluster_of())
    assert torch.is_grad_enabled()


# --- pauses ----------------------------------------------------------------------------------------------------------


class SlowToSave(nn.Linear):
    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(SAVING_S)
        return super().state_dict(*arguments, **options)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_no_step_waits_while_rank_0_saves(strategy: str, tmp_path: Path) -> None:
    def script(worker: Worker, out: Path) -> None:
        model = SlowToSave(10, 4)
        model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)

    result = run(script, tmp_path, strategy, 3, cluster=cluster_of(), checkpoint_every=3)
    assert len([event for event in result.events if event.name == "checkpoint"]) > 1
    assert max(record.waiting_s for record in result.steps) < SAVING_S


def test_waits_have_a_deadline_but_for_those_in_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_force: dict[int, float | None] = {}

    def set_deadline(collective: VirtualCollective, deadline_s: float | None) -> None:
        in_force[collective.rank] = deadline_s

    def script(worker: Worker, out: Path) -> None:
        model, optimizer, loader = prepared(worker)
        worker.evaluation(lambda model: {"deadline_s": in_force[0] or 0.0})
        for x, y, _ in loader:
            assert in_force[worker.rank] == 7.0
            step(worker, model, optimizer, x, y)

    monkeypatch.setattr(VirtualCollective, "set_deadline", set_deadline)
    result = run(script, tmp_path, "all-reduce", 2, cluster=cluster_of(), eval_every=3, deadline_s=7.0)
    assert {evaluation.metrics["deadline_s"] for evaluation in result.evaluations} == {0.0}


# --- ends ------------------------------------------------------------------------------------------------------------


def test_sleep_takes_virtual_time(tmp_path: Path) -> None:
    def script(worker: Worker, out: Path) -> None:
        model, optimizer, loader = prepared(worker)
        for x, y, _ in loader:
            time.sleep(3600.0)
            step(worker, model, optimizer, x, y)

    began_s = time.monotonic()
    result = run(script, tmp_path, "all-reduce", 2, cluster=cluster_of(), max_steps=5)
    assert result.training_time_s == pytest.approx(5 * 3600, rel=1e-3)
    assert time.monotonic() - began_s < 600  # of 18,000
    assert time.sleep.__module__ == "time"


def test_who_waits_in_vain_is_named(tmp_path: Path) -> None:
    def script(worker: Worker, out: Path) -> None:
        if worker.rank != 1:
            worker.barrier()

    with pytest.raises(RunFailed, match=r"nobody can go on: worker 0 waits for barrier.* rank\(s\) 1 have not come"):
        run(script, tmp_path, "all-reduce", 3, cluster=cluster_of())


def test_a_wait_inside_backward_is_refused(tmp_path: Path) -> None:
    def script(worker: Worker, out: Path) -> None:
        tensor = torch.ones(2, requires_grad=True)
        tensor.register_post_accumulate_grad_hook(lambda given: worker.all_reduce(torch.ones(1)))
        tensor.sum().backward()

    with pytest.raises(RunFailed, match="nothing can be waited for in the middle of a backward pass"):
        run(script, tmp_path, "all-reduce", 2, cluster=cluster_of())


def test_a_host_that_fails_ends_the_run(tmp_path: Path) -> None:
    cluster = cluster_of(failures_per_hour=3600.0 / (STEP_S * 20))
    with pytest.raises(RunFailed, match=r"(worker|server) \d died"):
        run(tiny, tmp_path, "ps-asp", 4, cluster=cluster)
    lost = [event for event in Result(tmp_path / "run").events if event.name == "lost"]
    assert len(lost) == 1
    assert lost[0].details["virtual_time_s"] > 0


def test_an_interrupt_saves_and_ends(tmp_path: Path) -> None:
    launcher = os.getpid()

    def script(worker: Worker, out: Path) -> None:
        model, optimizer, loader = prepared(worker)
        for number in range(1000):
            for x, y, _ in loader:
                step(worker, model, optimizer, x, y)
            if number == 2 and worker.rank == 0:
                os.kill(launcher, signal.SIGINT)

    handler, watcher = signal.getsignal(signal.SIGINT), Listener()
    with pytest.raises(KeyboardInterrupt):
        run(script, tmp_path, "all-reduce", 2, cluster=cluster_of(), watcher=watcher)
    assert watcher.of("run") == [
        "interrupted: it ends where all workers may, and saves; a second Ctrl-C ends it at once"
    ]
    assert signal.getsignal(signal.SIGINT) is handler
    result = Result(tmp_path / "run")
    assert 30 < result.iteration < 12_000
    assert [event.name for event in result.events[-2:]] == ["checkpoint", "interrupted"]


def test_output_is_told_with_who_printed_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        worker = paceline.init()
        print("one", end="")
        worker.barrier()
        print(f" and two of {worker.rank}")
        train(worker, tmp_path, num_epochs=1)

    class Loud(Quiet):
        def on_progress(self, progress: Progress) -> None:
            print("progress", flush=True)

    paceline.run(script, workers=2, engine="virtual", cluster=cluster_of(), out=tmp_path / "run", watcher=Loud())
    out = capsys.readouterr().out
    assert "\nprogress\n" in out
    assert "] progress" not in out
    assert "[worker-0] one and two of 0\n" in out
    assert "[worker-1] one and two of 1\n" in out


# --- asking for it ---------------------------------------------------------------------------------------------------


def test_run_by_name_of_a_shipped_cluster(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = paceline.run(
        script,
        strategy="ps-ssp",
        workers=5,
        arguments=["0.1"],
        engine="virtual",
        cluster="volunteers",
        out=tmp_path / "run",
    )
    assert result.is_virtual
    assert result.manifest["cluster"]["about"].startswith("Volunteers")
    assert result.iteration == 20
    assert result.training_time_s > 4 * 2 * 0.018  # four times from homes to a data centre and back


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "virtuel"}, "unknown engine 'virtuel'; did you mean 'virtual'"),
        ({"engine": "virtual"}, "--engine virtual needs --cluster: a TOML file, or one of commodity-10gbe"),
        ({"cluster": "published"}, "add --engine virtual"),
        ({"engine": "virtual", "cluster": "published", "address": "auto"}, "--address has no effect"),
        ({"engine": "virtual", "cluster": "published", "workers": 99}, r"room for 40 worker\(s\), not 99"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        paceline.run(train, out=tmp_path / "run", **settings)


def test_a_model_that_is_not_called_itself_has_no_time(tmp_path: Path) -> None:
    def script(worker: Worker, out: Path) -> None:
        model, optimizer, loader = prepared(worker)
        for x, _, _ in loader:
            model[0](x).mean().backward()
            optimizer.step()

    with pytest.raises(RunFailed, match=r"call model\(\.\.\.\) rather than its parts"):
        run(script, tmp_path, "all-reduce", 2, cluster=cluster_of())
