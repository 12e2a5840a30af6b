"""Rounds of clients while simulated hosts fail and others come: every round is that of the undisturbed run."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.cluster.description import Cluster
from paceline.elastic import Elastic
from paceline.errors import UsageError
from paceline.running.result import Result
from paceline.strategies.federated.joining import Joining
from tests.conformance.test_virtual_failures import CLUSTER, named
from tests.covering import in_turns

SAMPLES, ROUNDS, WORKERS = 96, 6, 4
_SOON = replace(CLUSTER, hosts=(replace(CLUSTER.hosts[0], count=8, back_after_s=5.0),))
FAILING = replace(_SOON, compute=replace(CLUSTER.compute, failures_per_hour=50.0))
SPOT = replace(_SOON, hosts=(replace(_SOON.hosts[0], preemptions_per_hour=60.0, notice_s=15.0),))
CLIENTS = {"clients": 9, "fraction": 0.67, "partition": "exponential", "partition.ratio": 3}
"""Six of nine in a round, of 5 to 16 samples, so that one of four workers has two turns at least."""


def network(strategy: str) -> nn.Module:
    """In double precision, so that the order of sums shows in the last digits alone."""
    torch.manual_seed(3)
    hides = strategy.startswith("dp-") or "secure" in strategy
    norm = nn.GroupNorm(2, 8) if hides else nn.BatchNorm1d(8)
    layers = {"body": nn.Linear(10, 8), "norm": norm, "act": nn.ReLU(), "head": nn.Linear(8, 4)}
    return nn.Sequential(OrderedDict(layers)).double()


def train(
    out: Path, strategy: str, *, cluster: Cluster = CLUSTER, at_least: int = 1, passes: int = 300, **settings: Any
) -> Result:
    """An elastic run; a static one with `at_least=0`."""

    def script() -> None:
        worker = paceline.init()
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 10, generator=generator).double()
        labels = torch.arange(SAMPLES) % 4
        model = network(strategy)
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True, drop_last=True)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)

        @worker.evaluation
        def loss(model: nn.Module) -> dict[str, float]:
            return {"loss": F.cross_entropy(model(inputs[:4]), labels[:4]).item()}

        for _ in range(passes):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
                optimizer.step()

    elastic = Elastic(at_least=at_least, at_most=6, replacements=50, global_batch="grow") if at_least else None
    given = {"workers": WORKERS, "max_steps": ROUNDS, "options": CLIENTS, "elastic": elastic, **settings}
    return paceline.run(script, strategy=strategy, engine="virtual", cluster=cluster, out=out, **given)


def kept_by_clients(result: Result) -> dict[str, Tensor]:
    checkpoint = Checkpoint.decode((result.directory / FILE_NAME).read_bytes(), where="")
    found: dict[str, Tensor] = {}
    for worker in checkpoint.workers:
        found |= {name: tensor for name, tensor in worker.own.items() if name.startswith("client.")}
    return found


def require_same(result: Result, other: Result, *, strategy: str) -> None:
    """The server's model, what each client keeps, and what was trained on. Private layers of the evaluated model are
    those that workers have in place, and so left out."""
    private = {"fed-bn": "norm", "fed-rep": "head"}.get(strategy.partition(":")[0], "nothing")
    own, wanted = (
        {name: tensor for name, tensor in each.model_state().items() if not name.startswith(private)}
        for each in (result, other)
    )
    assert float(wanted["body.weight"].abs().sum()) > 0
    torch.testing.assert_close(own, wanted, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(kept_by_clients(result), kept_by_clients(other), rtol=1e-7, atol=1e-9)
    last, last_wanted = result.evaluations[-1], other.evaluations[-1]
    assert (last.iteration, last.samples) == (last_wanted.iteration, last_wanted.samples)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many contributions each round that a worker has ended was joined of."""
    found: list[int] = []
    clear = Joining.clear

    def cleared(joining: Joining) -> None:
        found.append(int(joining._tally[1]))
        clear(joining)

    monkeypatch.setattr(Joining, "clear", cleared)
    return found


METHODS: dict[str, dict[str, Any]] = {
    "fed-avg": {},
    "fed-avg:optimizer=kept:codec=top-k:codec.ratio=0.3": {},
    "fed-avg:aggregate=median": {},
    "fed-avg:sampler=poisson": {},
    "fed-avg:reject=validation": {"options": {**CLIENTS, "reject.metric": "loss"}},
    "fed-avg:weights=equal": {"attack": "sign-flip:workers=2"},
    "fed-prox": {},
    "fed-avgm": {},
    "fed-adam": {},
    "scaffold": {},
    "fed-nova": {},
    "fed-bn": {},
    "fed-rep": {},
    "fed-buff": {"options": {**CLIENTS, "sampler.at_once": 0.4}},
    "dp-fed-avg": {},
}


@pytest.mark.parametrize(("how", "strategy"), in_turns(METHODS, ("failing", "with notice"), are_quick=True))
def test_whoever_dies_and_comes_rounds_are_those_of_the_undisturbed_run(
    tmp_path: Path, strategy: str, how: str
) -> None:
    cluster = FAILING if how == "failing" else SPOT
    settings = METHODS[strategy]
    wanted = train(tmp_path / "undisturbed", strategy, at_least=0, **settings)
    result = train(tmp_path / "run", strategy, cluster=cluster, **settings)
    assert named(result, "lost" if cluster is FAILING else "left")
    assert any(event["joined"] for event in named(result, "reformed"))
    require_same(result, wanted, strategy=strategy)


def test_changes_under_masks_are_summed_whoever_dies(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    strategy = "fed-avg:secure=masks"
    wanted = train(tmp_path / "undisturbed", strategy, at_least=0)
    result = train(tmp_path / "run", strategy, cluster=FAILING)
    assert named(result, "lost")
    require_same(result, wanted, strategy=strategy)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_each_round_has_each_client_once(tmp_path: Path, counted: list[int], seed: int) -> None:
    """Whoever has played it when its worker died: six contributions, on each worker that ends the round."""
    result = train(tmp_path / "run", "fed-avg", cluster=FAILING, seed=seed)
    assert named(result, "lost")
    assert set(filter(None, counted)) == {6}
    assert len(list(filter(None, counted))) >= ROUNDS


def test_one_is_left_and_plays_for_all(tmp_path: Path) -> None:
    wanted = train(tmp_path / "undisturbed", "scaffold", at_least=0, seed=1)
    lonely = Elastic(at_least=1, at_most=4, global_batch="grow")
    cluster = replace(FAILING, compute=replace(FAILING.compute, failures_per_hour=70.0))
    result = train(tmp_path / "run", "scaffold", cluster=cluster, at_least=0, elastic=lonely, seed=1)
    assert len(named(result, "lost")) == 3
    assert len(named(result, "reformed")[-1]["ranks"]) == 1
    require_same(result, wanted, strategy="scaffold")


@pytest.mark.parametrize("strategy", ["fed-avg", "scaffold", "fed-bn"])
def test_while_nobody_dies_it_is_the_static_run(tmp_path: Path, strategy: str) -> None:
    """Bit for bit where clients keep nothing; otherwise others may play them."""
    static, elastic = (train(tmp_path / name, strategy, at_least=least) for name, least in (("static", 0), ("on", 1)))
    require_same(elastic, static, strategy=strategy)
    if strategy == "fed-avg":
        torch.testing.assert_close(elastic.model_state(), static.model_state(), rtol=0, atol=0)
        assert elastic.training_time_s == pytest.approx(static.training_time_s, rel=1e-3)


@pytest.mark.parametrize(
    ("begun", "strategy"),
    [
        *in_turns(["fed-avgm", "scaffold", "fed-rep"], [(1, 3), (0, 4), (1, 5)], are_quick=True),
        pytest.param((1, 2), "scaffold", marks=pytest.mark.slow),  # fewer, whose clients have kept something
    ],
)
def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path, strategy: str, begun: tuple[int, int]) -> None:
    """Also from a run that was not elastic, whose workers have each kept the state of their own clients."""
    at_least, workers = begun
    wanted = train(tmp_path / "undisturbed", strategy, at_least=0)
    cluster = FAILING if at_least else CLUSTER
    train(tmp_path / "begun", strategy, cluster=cluster, at_least=at_least, max_steps=3)
    result = train(tmp_path / "run", strategy, cluster=FAILING, workers=workers, resume=tmp_path / "begun")
    require_same(result, wanted, strategy=strategy)
    with pytest.raises(UsageError, match="was saved by an elastic run; resume it with --elastic MIN:MAX"):
        train(tmp_path / "static", strategy, at_least=0, resume=tmp_path / "run", max_steps=ROUNDS + 1)


def test_workers_without_a_turn_leave_and_come(tmp_path: Path) -> None:
    """Two clients a round, and four workers, of which some never have a turn: they end rounds, leave when their hosts
    are taken away, and are followed by others."""
    options = {**CLIENTS, "fraction": 0.22}
    wanted = train(tmp_path / "undisturbed", "fed-avg", at_least=0, workers=2, options=options, max_steps=20)
    result = train(tmp_path / "run", "fed-avg", cluster=SPOT, options=options, max_steps=20)
    left = Counter(event.who for event in result.events if event.name == "left")
    assert set(left) & {"worker-2", "worker-3"}
    require_same(result, wanted, strategy="fed-avg")


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        ("fed-avg:aggregate=fools-gold", {}, "It takes no aggregate that remembers"),
        (
            "fed-avg",
            {"elastic": Elastic(at_least=1, at_most=4)},
            "a round has the samples of its clients",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    tmp_path: Path, strategy: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        train(tmp_path / "run", strategy, at_least=0 if settings else 1, **settings)
