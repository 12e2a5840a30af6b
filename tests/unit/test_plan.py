"""The search, what is observed of a script, the sentences, and the command."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import cli
from paceline.cli.plan import table as shown_table
from paceline.cluster.description import Cluster, Communication, Compute, Hosts, Servers
from paceline.errors import UsageError
from paceline.lab import words
from paceline.planner import StepWork, figures, predict, wording
from paceline.planner.noise import NoiseScale
from paceline.planner.observing import NOISE_STEPS, observe
from paceline.planner.search import Check, best_of, plan, worker_counts
from paceline.strategies import STRATEGIES

WORK = StepWork(tensor_bytes=(4_000_000,), samples=32)


def cluster_of(count: int = 40, *, gbit_per_s: float = 1.0, placement: str = "separate") -> Cluster:
    hosts = Hosts(count=count, bandwidth_gbit_per_s=gbit_per_s, latency_us=10.0, memory_gbyte_per_s=1e4)
    return Cluster(hosts=(hosts,), compute=Compute(step_s=0.1), servers=Servers(placement=placement))  # type: ignore[arg-type]


# --- search ----------------------------------------------------------------------------------------------------------


def test_numbers_of_workers() -> None:
    assert worker_counts(1) == [1]
    assert worker_counts(10) == [1, 2, 3, 4, 6, 8, 10]
    assert worker_counts(24) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


def test_every_combination_that_has_room() -> None:
    found = plan(cluster_of(6), WORK, num_checks=0)
    of_servers = {(p.prediction.workers, p.prediction.servers) for p in found.points if p.label.startswith("ps-asp")}
    assert of_servers == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)}
    assert {p.prediction.workers for p in found.points if p.label == "all-reduce"} == {1, 2, 3, 4, 6}
    assert len(found.frame) == len(found.points)
    moving_alike = {"post-local", "slowmo", "diloco"}
    federated = {name for name, entry in STRATEGIES.items() if entry.strategy is STRATEGIES["fed-avg"].strategy}
    names = {name for name, entry in STRATEGIES.items() if not entry.is_another_name}
    assert set(found.frame["strategy"]) == names - moving_alike - federated - {"horovod"}
    assert found.unpriced == ("fed-avg", "dp-fed-avg", "scaffold", "fed-bn", "fed-buff"), "with unknown data"


def test_the_best_needs_the_fewest_of_those_that_are_as_good() -> None:
    found = plan(cluster_of(40, gbit_per_s=100.0), WORK, num_checks=0)
    top = max(point.merit for point in found.points)
    assert found.best.merit >= 0.95 * top
    fewer = [p for p in found.points if p.prediction.workers < found.best.prediction.workers]
    assert all(point.merit < 0.95 * top for point in fewer)


def test_knees_by_hand() -> None:
    """M / B = 32 ms through one server, 100 ms of computing: n workers' steps take 0.1 + 0.032 n and a piece, so that
    samples a second are n / (0.1 + 0.032 n), and the n-th adds half of one alone up to n = 1 or 2; with more servers
    later."""
    found = plan(cluster_of(), WORK, num_checks=0)
    knees = {knee.label: knee for knee in found.knees}
    assert knees["ps-bsp"].workers in (1, 2)
    assert knees["ps-bsp"].resource == "a server's card"
    moved = [knees[f"ps-bsp:servers={count}"].workers for count in (2, 4, 8)]
    assert all(count is not None for count in moved)
    assert knees["ps-bsp"].workers <= moved[0] < moved[1] < moved[2]  # type: ignore[operator]
    assert knees["all-reduce"].workers is None  # what a ring moves hardly grows


def test_a_fixed_global_batch_divides_computing() -> None:
    found = plan(cluster_of(8, gbit_per_s=1000.0), WORK, target_batch=32, num_checks=0)
    on_4 = next(p for p in found.points if p.label == "all-reduce" and p.prediction.workers == 4)
    assert on_4.batch == 8
    assert on_4.prediction.compute_s == pytest.approx(0.025)
    assert on_4.speedup == pytest.approx(4, rel=0.05)


def test_no_more_workers_than_samples() -> None:
    found = plan(cluster_of(40), WORK, target_batch=10, num_checks=0)
    assert max(point.prediction.workers for point in found.points) == 10
    assert {p.batch for p in found.points if p.prediction.workers == 10} == {1}


def test_noise_makes_large_batches_worth_less() -> None:
    """At a noise scale of one worker's batch, 16 times the batch saves (1 + 1) / (1 + 1/16) of the steps: 1.88."""
    found = plan(cluster_of(16, gbit_per_s=1e4), WORK, noise=NoiseScale(32.0), single_steps=100, num_checks=0)
    on_16 = next(p for p in found.points if p.label == "all-reduce" and p.prediction.workers == 16)
    assert on_16.target_speedup == pytest.approx(32 / 17, rel=0.01)
    assert on_16.target_s == pytest.approx(100 * 0.1 * 17 / 32, rel=0.01)
    late = next(p for p in found.points if p.label == "ps-asp:servers=8" and p.prediction.workers == 8)
    assert late.target_speedup == pytest.approx(2 / (1 + 1 / 8), rel=0.02)
    harmless = plan(cluster_of(16, gbit_per_s=1e4), WORK, noise=NoiseScale(32.0), staleness_penalty=0, num_checks=0)
    free = next(p for p in harmless.points if p.label == "ps-asp:servers=8" and p.prediction.workers == 8)
    assert free.target_speedup == pytest.approx(8, rel=0.02)


def test_checks_are_of_the_best_and_close() -> None:
    found = plan(cluster_of(16), WORK, num_checks=2)
    assert len(found.checks) == 2
    assert all(abs(check.deviation) < 0.05 for check in found.checks if "asp" not in check.label)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_workers": 0}, "max-workers must be 1 to 40"),
        ({"max_workers": 41}, "max-workers must be 1 to 40, .* raise count or workers"),
        ({"target_batch": 0}, "target-batch must be at least 1"),
        ({"staleness_penalty": math.nan}, "staleness-penalty must be a number"),
        ({"single_steps": 10.0}, "need a noise scale"),
        ({"single_steps": math.inf, "noise": NoiseScale(1.0)}, "must be above 0, not inf"),
    ],
)
def test_refusals(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(cluster_of(), WORK, **values)


def test_a_cluster_for_servers_only_is_refused() -> None:
    cluster = Cluster(hosts=(Hosts(workers=0, bandwidth_gbit_per_s=1.0),), compute=Compute(step_s=0.1))
    with pytest.raises(UsageError, match="no room for a worker"):
        plan(cluster, WORK)


def test_sentences_say_what_the_numbers_do() -> None:
    found = plan(cluster_of(), WORK)
    lines = wording.answer(found)
    assert lines[0].startswith(f"{found.best.label} on {found.best.prediction.workers} workers: ")
    said = next(line for line in lines if line.startswith("ps-bsp on "))
    most = best_of([p for p in found.points if p.prediction.strategy == "ps-bsp"]).prediction.workers
    assert said.startswith(f"ps-bsp on {most} workers")
    alone = plan(cluster_of(8, gbit_per_s=1e-4), replace(WORK, tensor_bytes=(40_000_000,)), num_checks=0)
    assert wording.answer(alone)[0].startswith("One worker alone")


def test_a_long_strategy_breaks_no_number() -> None:
    found = plan(cluster_of(), WORK, strategies=["single", "all-reduce:codec=auto:codec.among=bf16+int8"], num_checks=0)
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(shown_table(found))
    shown = console.export_text()
    assert len(found.best_of_each) == 2
    for point in found.best_of_each:
        assert f" {words.quantity(point.prediction.samples_per_s)} " in shown


def test_the_headline_says_what_it_goes_by() -> None:
    """By the noise scale a large batch may be worth nothing, and by throughput it is worth all its samples."""
    fast = cluster_of(16, gbit_per_s=1e4)
    by_rate, by_noise = plan(fast, WORK, num_checks=0), plan(fast, WORK, noise=NoiseScale(1.0), num_checks=0)
    assert by_rate.best.prediction.workers > 8
    assert " by throughput only, without a noise scale." in wording.answer(by_rate)[0]
    assert wording.answer(by_noise)[0].startswith("One worker alone: by a noise scale of 1 samples no exchange pays")
    useful = plan(fast, WORK, noise=NoiseScale(5000.0), num_checks=0)
    assert useful.best.prediction.workers > 8
    assert (
        f"{useful.best.merit:.1f} times sooner than one worker by a noise scale of 5,000 samples"
        in (wording.answer(useful)[0])
    )


def test_hosts_of_servers_are_paid_for() -> None:
    """Four workers and four hosts for servers do at most half of what eight workers would."""
    work = replace(WORK, tensor_bytes=(4,))
    apart = predict(cluster_of(8), strategy="ps-bsp", options={"servers": 4}, workers=4, work=work)
    beside = predict(
        cluster_of(8, placement="with workers"), strategy="ps-bsp", options={"servers": 4}, workers=4, work=work
    )
    assert beside.efficiency == pytest.approx(1.0, abs=0.02)
    assert apart.efficiency == pytest.approx(0.5, abs=0.01)


def test_equal_curves_are_drawn_as_one() -> None:
    """With four bytes to move, what workers exchange makes no difference, and those that do not wait are faster."""
    found = plan(cluster_of(8), replace(WORK, tensor_bytes=(4,)), num_checks=0)
    tables = {chart.key: chart.table.set_index("strategy") for chart in figures.charts(found)}
    names = list(dict.fromkeys(tables["rate"].index))
    shared = next(name.split(" = ") for name in names if name.startswith("all-reduce"))
    assert len(shared) > 1
    left_out = ("single", "async-diloco")  # the one moves nothing, the other would be the ninth curve
    moving = [label for label in found.curves if ":" not in label and label not in left_out]
    assert sorted(label for name in names for label in name.split(" = ") if ":" not in label) == sorted(moving)
    for one, other in itertools.combinations(names, 2):
        pairs = [(table.loc[[one]].to_numpy(), table.loc[[other]].to_numpy()) for table in tables.values()]
        assert not all(a.shape == b.shape and np.allclose(a, b, rtol=0.005) for a, b in pairs), (one, other)


def test_servers_that_have_no_host_are_said_to_be_left_out() -> None:
    """Nobody is to think that they were found to be slow."""

    def said(count: int, placement: str = "separate") -> list[str]:
        found = plan(cluster_of(count, placement=placement), WORK, num_checks=0)
        return [line for line in wording.answer(found) if "left out" in line]

    assert "where no host is free for one" in said(1)[0]
    assert "where with more than 1 worker no host is free for one" in said(2)[0]
    assert not said(6)
    assert not said(1, placement="with workers")


def test_no_deviation_has_no_sign_of_its_own() -> None:
    found = plan(cluster_of(1), WORK, num_checks=0)
    checked = replace(found, checks=(Check("single", 1, predicted_s=1.0, simulated_s=1.0 + 1e-9),))
    assert wording.answer(checked)[-1].endswith("single on 1 +0.0%.")


def test_a_time_that_was_counted_is_said_and_one_that_was_measured_is_not() -> None:
    hosts = Hosts(count=4, bandwidth_gbit_per_s=1.0, gflop_per_s=8.0)
    work = replace(WORK, forward_flop=1e9)

    def remarks(compute: Compute, work: StepWork) -> list[str]:
        found = plan(Cluster(hosts=(hosts,), compute=compute), work, num_checks=0)
        return [line for line in wording.answer(found) if "counted, not measured" in line]

    (said,) = remarks(Compute(), work)
    assert "step_s in [compute]" in said
    assert "paceline probe" in said
    timed = Compute(step_s=0.1), Compute(sample_s=0.01), Compute(distribution="trace", trace_s=(0.1, 0.2))
    assert not any(remarks(compute, work) for compute in timed)
    assert not remarks(Compute(), replace(work, step_s=0.1))


def test_a_plan_says_that_it_takes_links_to_be_shared_evenly_where_they_are_not() -> None:
    hosts = Hosts(count=4, bandwidth_gbit_per_s=1.0)
    for unevenness, count in ((0.0, 0), (0.4, 1)):
        cluster = Cluster(
            hosts=(hosts,), compute=Compute(step_s=0.1), communication=Communication(unevenness=unevenness)
        )
        said = wording.answer(plan(cluster, WORK, num_checks=0))
        assert len([line for line in said if "share links evenly" in line]) == count


# --- scripts ---------------------------------------------------------------------------------------------------------


def train(*, steps: int = 1000, has_evaluation: bool = True) -> None:
    """A script: two layers, 40 + 4 and 8 + 2 parameters, batches of 16."""
    worker = paceline.init()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16 * steps, 10, generator=generator)
    labels = (inputs.sum(dim=1) > 0).long()
    model = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)

    def never(model: nn.Module) -> dict[str, float]:
        raise AssertionError("a plan evaluates nothing")

    if has_evaluation:
        worker.evaluation(never)

    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_what_a_script_asks_for_is_seen() -> None:
    seen = observe(train)
    assert seen.work.tensor_bytes == (160, 16, 32, 8)
    assert seen.work.samples == 16
    assert seen.work.state_bytes == 216
    assert seen.work.forward_flop == 16 * 2 * (10 * 4 + 4 * 2)
    assert seen.work.backward_shares[0] > seen.work.backward_shares[2] > seen.work.backward_shares[3]
    assert seen.work.is_element_wise
    assert seen.noise is None


def accumulate() -> None:
    """A script: two passes of 16 samples a step, after an evaluation of its own."""
    worker = paceline.init()
    data = TensorDataset(torch.randn(640, 10), torch.zeros(640, dtype=torch.long))
    model = nn.Linear(10, 2)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=16))
    with torch.no_grad():
        model(torch.zeros(100, 10))
    for number, (x, y) in enumerate(loader):
        with worker.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            F.cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_all_passes_of_a_step_count_and_evaluations_do_not() -> None:
    seen = observe(accumulate)
    assert seen.work.samples == 32
    assert seen.work.forward_flop == 32 * 2 * 10 * 2


def test_its_noise_scale_is_seen() -> None:
    seen = observe(train, measures_noise=True)
    assert seen.noise is not None
    assert 1 < seen.noise.samples < 10_000


def test_a_script_that_cannot_be_run_says_why() -> None:
    def fails() -> None:
        raise ValueError("no such data")

    with pytest.raises(UsageError, match=r"no such data"):
        observe(fails)
    with pytest.raises(UsageError, match=r"at least 2 steps.*ended after 1 step"):
        observe(lambda: train(steps=1, has_evaluation=False))
    with pytest.raises(UsageError, match=rf"at least 30 steps.*ended after {NOISE_STEPS} step"):
        observe(lambda: train(steps=NOISE_STEPS, has_evaluation=False), measures_noise=True)


# --- command ---------------------------------------------------------------------------------------------------------

SCRIPT = """
from tests.unit.test_plan import train
train()
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "plan", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    out = tmp_path / "plan"
    options = ("--cluster", "commodity-10gbe", "--max-workers", 4, "--noise-scale", 100, "--out", out)
    assert run(monkeypatch, script, *options) == 0
    shown = capsys.readouterr().out
    for name in ("single", "all-reduce", "ps-bsp", "sooner", "Gradient noise scale: about 100 samples", "simulator"):
        assert name in shown
    counted = "How long a step computes was counted, not measured"
    assert counted in shown
    table = pd.read_csv(out / "plan.csv")
    assert table["workers"].max() == 4
    assert (table["step_s"] > 0).all()
    page = (out / "plan.html").read_text(encoding="utf-8")
    assert "train.py on commodity-10gbe" in page
    assert counted in page
    assert "http://" not in page.split("<script>")[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cluster", "commodity-10gb"), "did you mean 'commodity-10gbe'?"),
        (("--cluster", "lab-1gbe", "--noise-scale", "many"), "is neither measure nor a number of samples"),
        (("--cluster", "lab-1gbe", "--out", __file__), "is a file, not a directory for plan.html and plan.csv"),
        (("--cluster", "lab-1gbe", "--max-workers", 100), "max-workers must be 1 to 32"),
    ],
)
def test_the_command_refuses(
    options: tuple[object, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert run(monkeypatch, script, *options) == 2
    assert said in capsys.readouterr().err
