"""Training through codecs: on both engines, on one host and several, with gradients that are not finite."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.cluster.description import Cluster, Hosts, Servers
from paceline.codec import PowerSGD
from paceline.codec.costs import coding_s
from paceline.errors import UsageError
from paceline.planner import StepWork, predict
from paceline.running.result import Result
from paceline.strategies import build, settings_of
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.rows import CODECS, JOINT_CODECS, launched, loader_of, problem, train
from tests.conformance.test_virtual_costs import step_s
from tests.conformance.virtual_cluster import GIGABIT, PLAIN, STEP_S, cluster_of
from tests.covering import in_turns

WORKERS, NUM_FIRST = 4, 12
HOSTS_OF_TWO = replace(virtual_engine.CLUSTER, hosts=(Hosts(count=8, workers=2, bandwidth_gbit_per_s=1.0),))
ONE_HOST = Cluster(
    hosts=(Hosts(count=1, workers=8, bandwidth_gbit_per_s=1.0),),
    compute=virtual_engine.CLUSTER.compute,
    servers=Servers(placement="with workers"),
)


def run(out: Path, strategy: str, codec: str | None, **settings: Any) -> Result:
    options = {} if codec is None else {"codec": codec}
    program = partial(launched, settings.pop("script", train), out)
    engine = settings.pop("engine", virtual_engine)
    settings = {"workers": WORKERS, "options": options | settings.pop("options", {}), **settings}
    return engine.run(program, strategy=strategy, out=out / "run", **settings)


def parameters(result: Result) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in result.model_state().values()])


def loss(state: dict[str, torch.Tensor]) -> float:
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
    model.load_state_dict(state)
    x, y, _ = problem().tensors
    return float(F.cross_entropy(model(x), y).detach())


def learned(out: Path, strategy: str, codec: str | None, *, max_steps: int = 30) -> Result:
    """On hosts with two workers each, where workers average."""
    cluster = HOSTS_OF_TWO if strategy == "all-reduce" else virtual_engine.CLUSTER
    return run(out, strategy, codec, cluster=cluster, max_steps=max_steps)


def moved_by(result: Result) -> int:
    """What its second worker has moved."""
    return sum(step.moved_bytes for step in result.steps if step.worker == 1)


def told(result: Result) -> dict[tuple[int, int], tuple[float, float]]:
    """When each of the first steps ended, and with which loss."""
    losses = {(record.worker, record.step): record.value for record in result.logged}
    first = (step for step in result.steps if step.iteration < NUM_FIRST)
    return {(step.worker, step.step): (step.time_s, losses[step.worker, step.step]) for step in first}


@pytest.fixture(scope="module")
def plain_bytes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], int]:
    """What the second worker moves without a codec."""
    return functools.cache(lambda strategy: moved_by(learned(tmp_path_factory.mktemp(strategy), strategy, None)))


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        *in_turns(CODECS, ("all-reduce", "ps-bsp"), are_quick=True),
        *(("all-reduce", codec) for codec in JOINT_CODECS),
        *(("ps-asp", codec) for codec in ("int8", "top-k:ratio=0.2", "random-k:ratio=0.5")),
    ],
)
def test_models_learn_through_codecs_and_less_moves(
    strategy: str, codec: str, tmp_path: Path, plain_bytes: Callable[[str], int]
) -> None:
    """A second run begins as the first."""
    coded, again = (learned(tmp_path / str(steps), strategy, codec, max_steps=steps) for steps in (30, NUM_FIRST))
    assert told(again) == told(coded)
    assert len(told(again)) >= NUM_FIRST - 1
    assert loss(coded.model_state()) < (3.0 if codec == "sign" else 1.3)  # whose steps are as long as the learning rate
    if strategy != "all-reduce":  # whose second worker sends nothing over links
        assert moved_by(coded) < plain_bytes(strategy)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_on_one_host_nothing_is_coded_and_that_is_recorded(strategy: str, tmp_path: Path) -> None:
    coded, plain = (
        run(tmp_path / str(codec), strategy, codec, cluster=ONE_HOST, options=PLAIN if strategy == "ps-bsp" else {})
        for codec in ("one-bit", None)
    )
    assert torch.equal(parameters(coded), parameters(plain))
    (tuned,) = [event.details for event in coded.events if event.name == "tuned"]
    assert tuned["codec"] == "nothing is coded: all workers are on one host"
    everything = run(tmp_path / "all", strategy, "one-bit", cluster=ONE_HOST, options={"codec_scope": "all"})
    assert not torch.equal(parameters(everything), parameters(plain))


@pytest.mark.parametrize("codec", ["int8", "one-bit", "random-k:ratio=0.5"])
def test_processes_and_simulated_hosts_train_alike(codec: str, tmp_path: Path) -> None:
    """Bytes that are decoded by a server elsewhere are what the simulated worker leaves in its memory."""
    real = run(tmp_path / "real", "ps-bsp", codec, engine=local_engine, workers=2, servers_are_local=False)
    simulated = run(tmp_path / "simulated", "ps-bsp", codec, workers=2)
    torch.testing.assert_close(parameters(real), parameters(simulated), rtol=1e-5, atol=1e-6)
    # In the step after a pause workers also compare what they push, here through shared memory and there between hosts.
    (real_bytes, real_steps), (simulated_bytes, simulated_steps) = (
        Counter(step.moved_bytes for step in result.steps).most_common(1)[0] for result in (real, simulated)
    )
    assert real_bytes == simulated_bytes > 0
    assert min(real_steps, simulated_steps) > len(real.steps) / 2


def train_by_votes(worker: Worker, out: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=2**-7), loader_of(problem()))
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_count_votes_as_workers_do(servers: int, tmp_path: Path) -> None:
    """To the bit: three workers always have a majority, and steps are powers of two."""
    settings: dict[str, Any] = {"script": train_by_votes, "workers": 3}
    among = run(tmp_path / "workers", "all-reduce", "sign", options={"codec_scope": "all"}, **settings)
    options = {"codec_scope": "all", "servers": servers}
    served = run(tmp_path / "servers", "ps-bsp", "sign", options=options, **settings)
    assert served.iteration == among.iteration == 8
    assert torch.equal(parameters(served), parameters(among))


def train_on_means(worker: Worker, out: Path) -> None:
    """Gradients are means of inputs, whatever the parameters are; the last step of a pass has fewer samples for some
    workers than for others."""
    model = nn.Linear(10, 1, bias=False)
    data = TensorDataset(problem().tensors[0][:94])
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4))
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("coded", "plain", "options", "owed"),
    [
        ("ps-bsp", "all-reduce", {"combine": "never"}, "push.0.left"),
        ("async-diloco", "local-sgd", {"every": 3, "quorum": 3, "outer": "average"}, "left.0"),
    ],
)
def test_what_is_left_out_of_uneven_batches_counts_once(
    coded: str, plain: str, options: dict[str, Any], owed: str, tmp_path: Path
) -> None:
    """As much as it would have counted in its own step."""
    settings: dict[str, Any] = {"script": train_on_means, "workers": 3}
    every = {name: options[name] for name in ("every",) if name in options}
    whole = run(tmp_path / "plain", plain, None, options=every, **settings)
    sent = run(tmp_path / "coded", coded, "top-k:ratio=0.1", options=options, **settings)
    checkpoint = Checkpoint.decode((sent.directory / FILE_NAME).read_bytes(), where="the run's")
    left = torch.stack([worker.own[owed].flatten()[:10] for worker in checkpoint.workers]).mean(0)
    assert float(left.abs().max()) > 1e-3
    scale = 0.1 if coded == "ps-bsp" else 1.0  # of gradients, or of changes, which are taken off
    torch.testing.assert_close(parameters(sent) - left * scale, parameters(whole), rtol=1e-5, atol=1e-6)


# --- gradients that are not finite -----------------------------------------------------------------------------------


def steady(worker: Worker, out: Path, *, bad_step: int | None) -> None:
    """The same gradient in every step, but a bad one on one worker, which is left out."""
    model = nn.Linear(40, 8, bias=False)
    factors = torch.randn(8, 40, generator=torch.Generator().manual_seed(5 + worker.rank))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for number, _ in enumerate(loader):
        optimizer.zero_grad()
        scale = torch.nan if number == bad_step and worker.rank == 1 else 1.0
        (model(torch.eye(40)) * factors.T * scale).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        ("all-reduce", "top-k:ratio=0.1"),
        ("all-reduce", "int8"),
        ("all-reduce", "powersgd:rank=1:start=0"),
        ("ps-bsp", "top-k:ratio=0.1"),
    ],
)
def test_a_step_that_is_left_out_leaves_no_trace(strategy: str, codec: str, tmp_path: Path) -> None:
    options = {"nonfinite": "skip"} | (PLAIN if strategy == "ps-bsp" else {})
    bad, good = (
        run(tmp_path / str(step), strategy, codec, script=partial(steady, bad_step=step), options=options, max_steps=4)
        for step in (2, None)
    )
    assert len(bad.steps) == len(good.steps) + WORKERS
    assert torch.equal(parameters(bad), parameters(good))


def scaled(worker: Worker, out: Path, *, bad_step: int | None) -> None:
    """As `steady`, with a GradScaler that finds the bad step and leaves it out itself."""
    model = nn.Linear(40, 8, bias=False)
    factors = torch.randn(8, 40, generator=torch.Generator().manual_seed(5 + worker.rank))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for number, _ in enumerate(loader):
        optimizer.zero_grad()
        scale = torch.inf if number == bad_step and worker.rank == 1 else 1.0
        scaler.scale((model(torch.eye(40)) * factors.T * scale).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("codec", ["top-k:ratio=0.1", "int8"])
@pytest.mark.parametrize("nonfinite", ["skip", "allow"])
def test_a_step_that_a_scaler_leaves_out_leaves_no_trace(nonfinite: str, codec: str, tmp_path: Path) -> None:
    """The scale is another power of two afterwards, by which no codec sees a difference."""
    bad, good = (
        run(
            tmp_path / str(step),
            "all-reduce",
            codec,
            script=partial(scaled, bad_step=step),
            options={"nonfinite": nonfinite},
            max_steps=4,
        )
        for step in (0, None)
    )
    assert parameters(bad).isfinite().all()
    assert torch.equal(parameters(bad), parameters(good))


# --- what it costs ---------------------------------------------------------------------------------------------------


def large(worker: Worker, out: Path, *, shape: tuple[int, ...] = (2_000_000,)) -> None:
    """8 MB of parameters, hardly a computation."""
    model = nn.Linear(10, 4)
    model.table = nn.Parameter(torch.zeros(shape))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_of(problem()))
    while True:
        for x, _, _ in loader:
            optimizer.zero_grad()
            (model(x).sum() + model.table.sum()).backward()
            optimizer.step()


def test_coding_takes_its_time_and_bytes_pass_links(tmp_path: Path) -> None:
    """Two workers, int8: each half of the table passes a link of 1 Gbit/s twice."""
    result = run(
        tmp_path, "all-reduce", "int8", script=large, workers=2, cluster=cluster_of(gbit_per_s=1.0), max_steps=4
    )
    strategy = build("all-reduce", {"codec": "int8"})
    coding = coding_s(strategy.codec, 2_000_044, 2)  # type: ignore[attr-defined]
    assert step_s(result) == pytest.approx(STEP_S + coding + 2_000_044 * (1 + 4 / 256) / GIGABIT, rel=0.02)


@pytest.mark.parametrize(("gbit_per_s", "takes"), [(0.05, True), (1000.0, False)])
def test_auto_takes_a_codec_where_it_makes_steps_shorter(gbit_per_s: float, takes: bool, tmp_path: Path) -> None:
    """And says why; a plan chooses the same."""
    result = run(
        tmp_path,
        "all-reduce",
        "auto:among=bf16+int8",
        script=large,
        workers=3,
        cluster=cluster_of(gbit_per_s=gbit_per_s),
        max_steps=16,
    )
    told = [event.details["codec"] for event in result.events if event.name == "tuned" and "codec" in event.details]
    assert len(told) == 1
    assert told[0].startswith("int8: a step of" if takes else "none: a step of")
    ends = [step.time_s for step in result.steps if step.worker == 0]
    before_s, after_s = ends[6] - ends[5], ends[-1] - ends[-2]
    assert (after_s < 0.6 * before_s) == takes
    work = StepWork(tensor_bytes=(8_000_000, 160, 16), samples=4)
    found, plain = (
        predict(cluster_of(gbit_per_s=gbit_per_s), strategy="all-reduce", workers=3, work=work, options=options)
        for options in ({"codec": "auto:among=bf16+int8"}, {})
    )
    assert (found.step_s < 0.6 * plain.step_s) == takes
    assert found.step_s == pytest.approx(after_s, rel=0.1)


def test_auto_takes_the_next_best_until_the_best_may_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PowerSGD, "first_step", property(lambda _: 10))
    script = partial(large, shape=(2000, 1000))
    options = {"script": script, "workers": 3, "cluster": cluster_of(gbit_per_s=0.05), "max_steps": 16}
    result = run(tmp_path, "all-reduce", "auto:among=int8+one-bit+powersgd:after=4", **options)
    told = [event.details["codec"] for event in result.events if event.name == "tuned" and "codec" in event.details]
    assert re.fullmatch(r"powersgd: .* with powersgd, from step 10 on, and .* ms with one-bit until then", told[0])
    ends = [step.time_s for step in result.steps if step.worker == 0]
    plain_s, before_s, after_s = (ends[step] - ends[step - 1] for step in (3, 7, 13))
    assert after_s < before_s < 0.2 * plain_s
    assert len(told) == 1


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("gossip", {}, marks=pytest.mark.slow),
        pytest.param("gossip", {"topology": "star", "every": "2"}, marks=pytest.mark.slow),
        pytest.param("local-sgd", {"every": "3", "post_local_from": "2", "warmup": "2"}, marks=pytest.mark.slow),
        ("diloco", {"every": "4", "fragments": "2"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("gbit_per_s", "takes"), [(0.05, True), (1000.0, False)])
def test_auto_chooses_among_what_neighbours_and_rounds_may_take(
    strategy: str, options: dict[str, str], gbit_per_s: float, takes: bool, tmp_path: Path
) -> None:
    """By the steps, or rounds, of all workers; a plan chooses the same."""
    cluster, codec = cluster_of(gbit_per_s=gbit_per_s), "auto:among=bf16+int8+sign:after=4"
    settings: dict[str, Any] = {"script": large, "workers": 3, "cluster": cluster, "max_steps": 20}
    result = run(tmp_path, strategy, codec, options=options, **settings)
    told = [event.details["codec"] for event in result.events if event.name == "tuned" and "codec" in event.details]
    assert len(told) == 1
    what = "step" if strategy == "gossip" else "round"
    assert told[0].startswith(f"int8: a {what} of" if takes else f"none: a {what} of")
    cycle = int(options.get("every", 1))
    ends = [step.time_s for step in result.steps if step.worker == 0]
    after_s = (ends[-1] - ends[-1 - 2 * cycle]) / (2 * cycle)
    work = StepWork(tensor_bytes=(8_000_000, 160, 16), samples=4)
    found, plain = (
        predict(cluster, strategy=strategy, workers=3, work=work, options=more)
        for more in ({**options, "codec": codec}, options)
    )
    assert (found.step_s < 0.6 * plain.step_s) == takes
    assert found.step_s == pytest.approx(after_s, rel=0.1)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("all-reduce", {}), ("gossip", {"order": "awc"}), ("local-sgd", {"every": "2"})],
    ids=str,
)
def test_processes_choose_alike(strategy: str, options: dict[str, str], tmp_path: Path) -> None:
    """By their own clocks, and go on: whoever chose otherwise would wait for the others for ever."""
    more = {"codec_scope": "all", **options}
    codec = "auto:among=bf16+int8:after=3"
    result = run(tmp_path, strategy, codec, engine=local_engine, workers=3, options=more, max_steps=8)
    told = [event.details["codec"] for event in result.events if event.name == "tuned" and "codec" in event.details]
    assert len(told) == 1
    assert told[0].partition(":")[0] in ("none", "bf16", "int8")
    assert result.iteration == 8


# --- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        ("ps-bsp", {"codec": "powersgd"}, "averages among workers half-way"),
        ("ps-bsp", {"codec": "sign"}, "use codec_scope=all"),
        ("ps-asp", {"codec": "sign", "codec_scope": "all"}, "each gradient is an update of its own"),
        ("ps-bsp", {"codec": "sign", "codec_scope": "all", "combine": "always"}, "nothing to vote on"),
        ("ps-bsp", {"codec": "sign", "codec_scope": "all", "aggregate": "median"}, "leave out aggregate=median"),
        ("ps-bsp", {"codec": "auto"}, "servers are told at the start"),
        ("all-reduce", {"codec": "auto:among=int9"}, "none of bf16"),
        ("all-reduce", {"codec_scope": "all"}, "no effect without a codec"),
        ("ring", {"codec": "int8"}, "leave out algorithm=ring"),
        ("all-reduce", {"codec": "top-k", "codec.ratio": "2"}, "ratio must be above 0"),
        ("all-reduce", {"codec": "int9"}, "int8"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build(strategy, options)


def test_a_codec_is_named_and_told_by_options() -> None:
    options = {"codec": "top-k", "codec.ratio": "0.02"}
    assert settings_of(build("ps-bsp", options)) == options
    assert build("all-reduce", {"codec": "top-k:ratio=0.02"}).codec == build("ps-bsp", options).codec  # type: ignore[attr-defined]
