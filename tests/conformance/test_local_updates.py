"""Local updates in whole runs: what they are beside all-reduce, what they move, and what a delay hides."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.comm.base import Collective, Work
from paceline.layout import Layout
from paceline.planner import StepWork, predict
from paceline.planner.simulator import simulate
from paceline.running.result import Result
from paceline.strategies.exchange import Exchange
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.odd_reading import Stream
from tests.conformance.reference import train_alone
from tests.conformance.rows import launched as launched_row
from tests.conformance.rows import loader_of, loader_to_leave, problem, steps_of, train
from tests.conformance.scripts import (
    EXACT,
    SCRIPTS,
    assert_close,
    launched,
    momentum,
    perceptron,
    plain_step,
    samples,
)
from tests.conformance.scripts import train as train_script
from tests.conformance.virtual_cluster import cluster_of

ENGINES = pytest.mark.parametrize("engine", [local_engine, virtual_engine], ids=["processes", "virtual"])


def run(engine: ModuleType, script: Any, out: Path, strategy: str, **settings: Any) -> Result:
    settings = {"workers": 2, **settings}
    found: Result = engine.run(partial(launched_row, script, out), strategy=strategy, out=out, **settings)
    return found


@ENGINES
@pytest.mark.parametrize("case", ["sgd", "momentum", "nesterov, weight decay", "two backward passes", "accumulate"])
def test_rounds_of_one_step_equal_one_process(case: str, engine: ModuleType, tmp_path: Path) -> None:
    """As all-reduce does, where steps are linear in the gradient and batches are as large as one another."""
    script, tolerance = SCRIPTS[case]
    program = partial(launched, script)
    result = engine.run(program, strategy="local-sgd", options={"every": 1}, workers=2, out=tmp_path)
    assert_close(result.model_state(), train_alone(script, 2), tolerance)


def test_uneven_batches_count_by_their_samples(tmp_path: Path) -> None:
    script = partial(train_script, optimizer=partial(SGD, lr=0.1), data=partial(samples, 91))
    program = partial(launched, script)
    result = local_engine.run(program, strategy="local-sgd", options={"every": 1}, workers=2, out=tmp_path)
    assert_close(result.model_state(), train_alone(script, 2), EXACT)


# --- what moves ------------------------------------------------------------------------------------------------------


def payload_of(monkeypatch: pytest.MonkeyPatch, out: Path, strategy: str, **options: Any) -> list[int]:
    """The bytes of gradients, or changes, of every exchange of a bucket by rank 0: no flags, padding or buffers."""
    found: list[int] = []

    def spied(
        self: Exchange, collective: Collective, buckets: Any, *, _init: Any = Exchange.__init__, **more: Any
    ) -> None:
        _init(self, collective, buckets, **more)
        layout: Layout = more["layout"]
        self.sizes = [  # type: ignore[attr-defined]
            sum(slot.spec.num_bytes for slot in segment.slots) for segment in layout.segments
        ]
        assert all(size <= bucket.values.nbytes for size, bucket in zip(self.sizes, buckets, strict=True))  # type: ignore[attr-defined]
        self.rank = collective.rank  # type: ignore[attr-defined]

    def started(self: Exchange, bucket: int, *, _start: Any = Exchange.start, **more: Any) -> Work:
        if self.rank == 0:  # type: ignore[attr-defined]
            found.append(self.sizes[bucket])  # type: ignore[attr-defined]
        work: Work = _start(self, bucket, **more)
        return work

    with monkeypatch.context() as patched:
        patched.setattr(Exchange, "__init__", spied)
        patched.setattr(Exchange, "start", started)
        run(virtual_engine, train, out, strategy, options=options)
    return found


def test_local_sgd_moves_an_hth_of_all_reduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, over 48 steps."""
    always = payload_of(monkeypatch, tmp_path / "all-reduce", "all-reduce")
    assert len(always) == 48
    seldom = {every: payload_of(monkeypatch, tmp_path / str(every), "local-sgd", every=every) for every in (1, 4, 12)}
    assert {every: every * sum(sizes) for every, sizes in seldom.items()} == dict.fromkeys(seldom, sum(always))
    parts = payload_of(monkeypatch, tmp_path / "parts", "diloco", every=4, fragments=2, delay=1)
    assert sum(parts) == sum(seldom[4]), "in parts as much"
    largest = 16 * 10 * 4  # the first layer's weight
    assert Counter(parts) == {largest: 12, max(seldom[4]) - largest: 12}, "and at most the larger part at a time"


def deep(worker: Worker, out: Path) -> None:
    """Four layers of 1 MB."""
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(4)))
    model, optimizer, _ = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_to_leave())
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.ones(2, 500)).mean().backward()
        optimizer.step()


def test_a_delay_hides_the_exchange_behind_the_steps_that_follow(tmp_path: Path) -> None:
    """Each of two fragments takes 2 (n - 1) / n * 2 MB at 1 Gbit/s: 16 ms, and a step 50 ms."""
    cluster = Cluster(hosts=(Hosts(count=2, bandwidth_gbit_per_s=1.0, latency_us=0.0),), compute=Compute(step_s=0.05))
    took_s = {}
    for delay in (0, 1):
        options = {"every": 8, "fragments": 2, "delay": delay}
        result = run(virtual_engine, deep, tmp_path / str(delay), "diloco", cluster=cluster, options=options)
        steps = steps_of(result, 0)
        took_s[delay] = sum(record.communication_s + record.waiting_s for record in steps)
        hidden_s = sum(record.hidden_s for record in steps)
        assert hidden_s >= 4 * 0.016 if delay else hidden_s == 0
    assert took_s[0] == pytest.approx(4 * 0.016, rel=0.05)
    assert took_s[1] < 0.001


def deep_with_momentum(worker: Worker, out: Path) -> None:
    """Four layers of 1 MB, whose optimizer keeps as much."""
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(4)))
    model, optimizer, _ = worker.prepare(model, SGD(model.parameters(), lr=1e-3, momentum=0.9), loader_to_leave())
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.ones(2, 500)).mean().backward()
        optimizer.step()


def test_moments_take_their_time_and_plans_know_it(tmp_path: Path) -> None:
    """Every second round as much again as the changes of one."""
    cluster = Cluster(hosts=(Hosts(count=2, bandwidth_gbit_per_s=1.0, latency_us=0.0),), compute=Compute(step_s=0.05))
    took_s, planned_s = {}, {}
    for period in (0, 2):
        options = {"every": 4, "momentum_every": period}
        result = run(
            virtual_engine, deep_with_momentum, tmp_path / str(period), "local-sgd", cluster=cluster, options=options
        )
        took_s[period] = sum(record.communication_s + record.waiting_s for record in steps_of(result, 0))
        work = StepWork(tensor_bytes=(1_000_000,) * 4, samples=2)
        asked: dict[str, Any] = {"strategy": "local-sgd", "workers": 2, "work": work, "options": options}
        planned_s[period] = 4 * predict(cluster, **asked).step_s
        assert 4 * simulate(cluster, **asked).step_s == pytest.approx(planned_s[period], rel=1e-3)
    assert took_s[2] == pytest.approx(1.5 * took_s[0], rel=0.02)
    assert planned_s[2] - planned_s[0] == pytest.approx((took_s[2] - took_s[0]) / 4, rel=0.05)


# --- data ------------------------------------------------------------------------------------------------------------


class Uneven(Stream):
    """Rank 1 has fewer samples than rank 0."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return itertools.islice(super().__iter__(), 40 - 12 * self.rank)


def train_on_a_stream(worker: Worker, out: Path) -> None:
    model = perceptron()
    loader = DataLoader(Uneven(rank=worker.rank, size=worker.size), batch_size=4)
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader)
    for _ in range(2):
        for batch in loader:
            plain_step(model, optimizer, batch)


@ENGINES
def test_the_stream_that_ends_first_ends_the_epoch_for_all(engine: ModuleType, tmp_path: Path) -> None:
    result = run(engine, train_on_a_stream, tmp_path, "local-sgd", options={"every": 3})
    assert [len(steps_of(result, rank)) for rank in (0, 1)] == [14, 14]


def train_eleven_steps(worker: Worker, out: Path) -> None:
    """Eleven steps: three rounds of four, the last of which the data ends."""
    model = nn.Linear(10, 4)
    loader = loader_of(problem(88))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for x, y, _ in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@ENGINES
def test_data_that_ends_in_a_round_ends_it(engine: ModuleType, tmp_path: Path) -> None:
    """With a fragment under way, too; and a resumed run has nothing left to do."""
    options = {"every": 4, "fragments": 2, "delay": 1}
    begun = run(engine, train_eleven_steps, tmp_path / "begun", "diloco", options=options)
    assert Checkpoint.decode((tmp_path / "begun" / FILE_NAME).read_bytes(), where="").iteration == 3
    again = run(engine, train_eleven_steps, tmp_path / "again", "diloco", options=options, resume=tmp_path / "begun")
    assert not again.steps
    torch.testing.assert_close(again.model_state(), begun.model_state(), rtol=0, atol=0)


@pytest.mark.parametrize(("every", "told"), [(11, [{"steps": 11}]), (6, [])])
def test_a_run_without_a_second_round_says_so(every: int, told: list[Any], tmp_path: Path) -> None:
    result = run(virtual_engine, train_eleven_steps, tmp_path, "local-sgd", options={"every": every})
    assert [event.details for event in result.events if event.name == "one_round"] == told


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_outer_state_once(tmp_path: Path) -> None:
    run(local_engine, train, tmp_path, "diloco", options={"every": 4}, max_steps=3)
    first, second = Checkpoint.decode((tmp_path / FILE_NAME).read_bytes(), where="").workers
    of_outer = {name for name in first.own if name.startswith("outer.")}
    assert len(of_outer) == 4
    assert not of_outer & set(second.own)
    assert set(first.own) - of_outer == set(second.own)


@pytest.mark.parametrize(
    ("first", "second"), [("all-reduce", "diloco"), ("diloco", "all-reduce"), ("diloco", "slowmo")]
)
def test_another_strategy_goes_on_from_the_outer_parameters(first: str, second: str, tmp_path: Path) -> None:
    options = {"all-reduce": {}, "diloco": {"every": 4, "fragments": 2, "alpha": 0.5}, "slowmo": {"every": 3}}
    begun = run(local_engine, train, tmp_path / "begun", first, options=options[first], max_steps=4)
    resumed = run(
        local_engine, train, tmp_path / "on", second, options=options[second], max_steps=4, resume=tmp_path / "begun"
    )
    torch.testing.assert_close(resumed.model_state(), begun.model_state(), rtol=0, atol=0)
    went_on = run(
        local_engine, train, tmp_path / "went", second, options=options[second], max_steps=6, resume=tmp_path / "begun"
    )
    assert went_on.iteration == 6


def test_a_fragment_on_its_way_keeps_the_weights_of_its_steps(tmp_path: Path) -> None:
    """Resumed where one fragment has a shorter batch behind it that has not been exchanged: to the bit."""
    script = partial(launched, partial(train_script, optimizer=partial(SGD, lr=0.1), data=partial(samples, 91)))
    settings = {"strategy": "diloco", "options": {"every": 4, "fragments": 2}, "workers": 2}
    whole = virtual_engine.run(script, out=tmp_path / "whole", max_steps=4, **settings)
    virtual_engine.run(script, out=tmp_path / "begun", max_steps=3, **settings)
    resumed = virtual_engine.run(script, out=tmp_path / "on", max_steps=4, resume=tmp_path / "begun", **settings)
    torch.testing.assert_close(resumed.model_state(), whole.model_state(), rtol=0, atol=0)


@ENGINES
def test_moments_with_periods_of_their_own_go_on_where_they_were(engine: ModuleType, tmp_path: Path) -> None:
    """Resumed between two of their averagings, and with a step that one worker leaves out: to the bit."""
    options = {"every": 2, "momentum_every": 2, "variance_every": 3, "nonfinite": "skip"}
    whole = run(engine, train_with_adam, tmp_path / "whole", "des-loc", options=options, max_steps=8)
    run(engine, train_with_adam, tmp_path / "begun", "des-loc", options=options, max_steps=3)
    went_on = run(
        engine, train_with_adam, tmp_path / "on", "des-loc", options=options, max_steps=8, resume=tmp_path / "begun"
    )
    assert whole.iteration == went_on.iteration == 8
    states = [Checkpoint.decode((tmp_path / name / FILE_NAME).read_bytes(), where="") for name in ("whole", "on")]
    for one, other in zip(*(each.workers for each in states), strict=True):
        assert one.own.keys() == other.own.keys()
        assert all(torch.equal(other.own[name], tensor) for name, tensor in one.own.items())
    torch.testing.assert_close(went_on.model_state(), whole.model_state(), rtol=0, atol=0)


def train_with_adam(worker: Worker, out: Path) -> None:
    """A sample makes its batch's gradient NaN, on whichever worker has it."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer, loader = worker.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.01), loader_of(problem())
    )
    for x, y, numbers in (batch for _ in range(4) for batch in loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * (torch.nan if 7 in numbers else 1.0)).backward()
        optimizer.step()


def train_and_clamp(worker: Worker, out: Path) -> None:
    """Weights are held within bounds after every step, those of a round's last step, too."""
    model = nn.Linear(10, 4)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.5), loader_of(problem()))
    worker.evaluation(lambda model: {"largest": max(float(p.detach().abs().max()) for p in model.parameters())})
    for _ in range(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.05, 0.05)


@ENGINES
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_script_does_after_a_round_is_in_evaluations_and_the_end(
    workers: int, engine: ModuleType, tmp_path: Path
) -> None:
    """And a run that goes on from there goes on with the outer parameters that it had, to the bit."""
    asked: dict[str, Any] = {"options": {"every": 2}, "workers": workers, "eval_every": 2}
    whole = run(engine, train_and_clamp, tmp_path / "whole", "diloco", max_steps=8, **asked)
    assert len(whole.evaluations) == 5
    assert all(each.metrics["largest"] <= 0.0501 for each in whole.evaluations[1:])
    assert all(float(tensor.abs().max()) <= 0.0501 for tensor in whole.model_state().values())
    run(engine, train_and_clamp, tmp_path / "begun", "diloco", max_steps=3, **asked)
    on = run(engine, train_and_clamp, tmp_path / "on", "diloco", max_steps=8, resume=tmp_path / "begun", **asked)
    torch.testing.assert_close(on.model_state(), whole.model_state(), rtol=0, atol=0)


def test_virtual_runs_repeat_themselves(tmp_path: Path) -> None:
    options = {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.5}
    runs = [
        run(virtual_engine, train, tmp_path / str(n), "diloco", options=options, cluster=cluster_of(gbit_per_s=0.1))
        for n in (0, 1)
    ]
    assert [record.time_s for record in runs[0].steps] == [record.time_s for record in runs[1].steps]
    torch.testing.assert_close(runs[1].model_state(), runs[0].model_state(), rtol=0, atol=0)
