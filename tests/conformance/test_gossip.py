"""Gossip on engines: what moves, what becomes of the models, what is recorded, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.cluster.description import Hosts
from paceline.codec import OneBit
from paceline.errors import RunFailed, UsageError
from paceline.outer import Average
from paceline.running.result import Result
from paceline.strategies import build
from paceline.strategies.gossip import Gossip
from paceline.topology import (
    Chain,
    Everybody,
    Exponential,
    Graph,
    OnePeerExponential,
    RandomPairs,
    Ring,
    Star,
    Topology,
    Torus,
)
from paceline.training.differing import CONSENSUS_DISTANCE
from paceline.training.worker import Worker
from tests.conformance import local_engine, rows, virtual_engine
from tests.conformance.rows import flat, keep, kept, launched, loader_of, network, problem, step

SIZE = 8
ENGINES = {"virtual": virtual_engine.run, "processes": local_engine.run}
every_engine = pytest.mark.parametrize("engine", ENGINES)


def run(script: Any, out: Path, strategy: Any, *, workers: int = SIZE, engine: str = "virtual", **more: Any) -> Result:
    out.mkdir(parents=True, exist_ok=True)
    return ENGINES[engine](partial(launched, script, out), strategy=strategy, workers=workers, out=out, **more)


class Point(nn.Module):
    """Numbers, whose loss is half the squared distance to this worker's own wish."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, wish: Tensor) -> Tensor:
        return (self.x - wish).square().sum() / 2


def pull(worker: Worker, out: Path, *, lr: float, num_steps: int, starts_apart: bool = False) -> None:
    """Each worker wishes another number, from -1 to 1; keeps what it has after each step."""
    model = Point()
    data = TensorDataset(torch.zeros(worker.size))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=lr), DataLoader(data))
    worker.evaluation(lambda model: {"x": float(model.x.detach())})  # type: ignore[arg-type]
    wish = torch.linspace(-1, 1, worker.size, dtype=torch.float64)[worker.rank]
    if starts_apart:
        with torch.no_grad():
            model.x.copy_(wish**3 + wish)
    seen = [float(model.x.detach())]
    for _ in range(num_steps):
        for _ in loader:
            optimizer.zero_grad()
            model(wish).backward()
            optimizer.step()
            seen.append(float(model.x.detach()))
    keep(out, f"seen-{worker.rank}", seen)


def seen(out: Path, size: int = SIZE) -> Tensor:
    """A row for each step, a column for each worker."""
    return torch.tensor([kept(out, f"seen-{rank}") for rank in range(size)], dtype=torch.float64).T


# --- models ----------------------------------------------------------------------------------------------------------


NORMS = [Ring(), Exponential(), Torus(), Star(), Chain()]


def num_exchanges(topology: Topology, size: int) -> int:
    """After which at most a millionth of the distance to the mean is left."""
    return math.ceil(math.log(1e-6) / math.log(topology.contraction(size)))


@pytest.mark.parametrize(
    ("engine", "topology", "size"),
    [
        *(("virtual", topology, SIZE) for topology in (Ring(), Exponential(), Torus())),
        ("processes", Exponential(), SIZE),
        *(
            pytest.param(engine, topology, size, marks=pytest.mark.slow)
            for engine, topology, size in (
                *(("virtual", topology, SIZE) for topology in (Star(), Chain())),
                *(("virtual", topology, 16) for topology in NORMS[:4]),
                *(("processes", topology, SIZE) for topology in (Ring(), Torus(), Star(), Chain())),
            )
        ),
    ],
    ids=str,
)
def test_exchanges_shrink_the_distance_to_the_mean(engine: str, topology: Topology, size: int, tmp_path: Path) -> None:
    """Each by the contraction at least, until a millionth of it is left."""
    script = partial(pull, lr=0.0, num_steps=num_exchanges(topology, size), starts_apart=True)
    where: dict[str, Any] = {}
    if engine == "virtual":
        where["cluster"] = replace(virtual_engine.CLUSTER, hosts=(Hosts(count=size, bandwidth_gbit_per_s=1.0),))
    run(script, tmp_path, Gossip(topology=topology), engine=engine, workers=size, **where)
    distances = [float((row - row.mean()).norm()) for row in seen(tmp_path, size)]
    norm = topology.contraction(size)
    assert distances[-1] <= 1.00001e-6 * distances[0]
    far = next(step for step, d in enumerate(distances) if d <= 1.00001e-6 * distances[0])
    assert far > 3
    for before, after in pairwise(distances[: far + 1]):
        assert after <= before * norm * 1.00001


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"order": "atc"}, 0.2200), ({"order": "awc"}, 0.2514), ({"mode": "relay", "topology": "chain"}, 0.0)],
    ids=["atc", "awc", "relay"],
)
def test_the_fixed_point_is_the_closed_form(options: dict[str, str], expected: float, tmp_path: Path) -> None:
    run(partial(pull, lr=0.1, num_steps=160), tmp_path, "gossip", options=options)
    assert float(seen(tmp_path)[-1].abs().max()) == pytest.approx(expected, abs=5e-5)


def naive_quasi_global(topology: Topology, num_steps: int, *, lr: float, factor: float) -> Tensor:
    wishes, x = torch.linspace(-1, 1, SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    momentum = torch.zeros_like(x)
    for number in range(num_steps):
        before = x
        x = topology.matrix(number, SIZE) @ (x - lr * (x - wishes + factor * momentum))
        momentum = factor * momentum + (1 - factor) * (before - x) / lr
    return x


def test_quasi_global_momentum_is_its_algorithm(tmp_path: Path) -> None:
    strategy = Gossip(topology=OnePeerExponential(), quasi_global=0.9)
    run(partial(pull, lr=0.1, num_steps=20), tmp_path, strategy)
    expected = naive_quasi_global(OnePeerExponential(), 20, lr=0.1, factor=0.9)
    torch.testing.assert_close(seen(tmp_path)[-1], expected, rtol=1e-12, atol=1e-12)


def naive_push_sum(topology: Topology, num_steps: int, *, lr: float) -> Tensor:
    """Sums and weights, shared out by columns."""
    wishes, x = torch.linspace(-1, 1, SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    weights = torch.ones_like(x)
    shares = (topology.matrix(0, SIZE) > 0).double()
    shares = shares / shares.sum(0)
    for _ in range(num_steps):
        x, weights = shares @ (x - lr * (x / weights - wishes)), shares @ weights
    return x / weights


@pytest.mark.parametrize("topology", [Star(), Graph(networkx.DiGraph([*((r, (r + 1) % 8) for r in range(8)), (0, 4)]))])
def test_push_sum_is_its_algorithm(topology: Topology, tmp_path: Path) -> None:
    run(partial(pull, lr=0.1, num_steps=20), tmp_path, Gossip(topology=topology, mode="push-sum"))
    torch.testing.assert_close(seen(tmp_path)[-1], naive_push_sum(topology, 20, lr=0.1), rtol=1e-9, atol=1e-12)


def naive_noloco(topology: Topology, num_steps: int, *, lr: float, every: int) -> Tensor:
    """Slow weights, changes and the momentum of the paper, its factor 0.5 and both of its rates 0.7."""
    wishes, fast = torch.linspace(-1, 1, SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    slow, momentum = fast.clone(), torch.zeros_like(fast)
    for number in range(1, num_steps + 1):
        fast = fast - lr * (fast - wishes)
        if number % every == 0:
            pairs = topology.matrix(number // every - 1, SIZE)
            momentum = 0.5 * momentum + 0.7 * (pairs @ (fast - slow)) - 0.7 * (slow - pairs @ slow)
            slow = slow + momentum
            fast = slow.clone()
    return fast


def test_noloco_is_its_algorithm(tmp_path: Path) -> None:
    run(partial(pull, lr=0.1, num_steps=25), tmp_path, "noloco", options={"every": "3"})
    expected = naive_noloco(RandomPairs(), 25, lr=0.1, every=3)
    torch.testing.assert_close(seen(tmp_path)[-1], expected, rtol=1e-12, atol=1e-12)


def test_an_outer_step_that_takes_the_mean_is_averaging(tmp_path: Path) -> None:
    """In any order, and in pairs that leave a worker out."""
    for order in ("atc", "awc"):
        script = partial(pull, lr=0.1, num_steps=12)
        models = []
        for name, more in (("average", {}), ("outer", {"outer": Average()})):
            strategy = Gossip(topology=RandomPairs(), every=2, order=order, mode=name, **more)
            run(script, tmp_path / order / name, strategy, workers=5)
            models.append(seen(tmp_path / order / name, 5))
        torch.testing.assert_close(*models, rtol=1e-12, atol=1e-12)


def train_with_a_tail(worker: Worker, out: Path) -> None:
    """An epoch's last batches have fewer samples, and not all as many."""
    torch.manual_seed(0)
    model = network()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem(91)))
    for _ in range(4):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


@every_engine
def test_gossip_over_everybody_is_all_reduce(engine: str, tmp_path: Path) -> None:
    found = run(train_with_a_tail, tmp_path / "gossip", Gossip(topology=Everybody()), workers=3, engine=engine)
    expected = run(train_with_a_tail, tmp_path / "all-reduce", "all-reduce", workers=3, engine=engine)
    assert found.iteration == expected.iteration
    torch.testing.assert_close(found.model_state(), expected.model_state(), rtol=1e-4, atol=1e-6)


# --- what moves ------------------------------------------------------------------------------------------------------


def train_wide(worker: Worker, out: Path) -> None:
    model = nn.Linear(10, 1000)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for x, _, _ in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("workers", [2, 5, 8])
@pytest.mark.parametrize("order", ["atc", "awc"])
def test_one_peer_gossip_moves_one_model_a_step(workers: int, order: str, tmp_path: Path) -> None:
    result = run(train_wide, tmp_path, "sgp", workers=workers, options={"order": order})
    model_bytes = 4 * 11 * 1000
    sent = [record.moved_bytes for record in result.steps if order == "atc" or record.step > 1]
    assert sent
    assert all(model_bytes <= num_bytes < 1.01 * model_bytes for num_bytes in sent)


def test_nothing_moves_between_exchanges(tmp_path: Path) -> None:
    result = run(train_wide, tmp_path, "gossip", workers=2, options={"every": "4"})
    assert {record.step % 4 for record in result.steps if record.moved_bytes} == {0}


def test_models_that_leave_before_the_gradient_move_behind_it(tmp_path: Path) -> None:
    """Computing takes 1 ms, a model 0.7 ms on its link."""
    behind, after = (
        run(train_wide, tmp_path / order, "sgp", workers=4, options={"order": order}) for order in ("awc", "atc")
    )
    assert sum(record.hidden_s for record in behind.steps) > 0.5 * sum(record.communication_s for record in after.steps)
    assert behind.training_time_s < 0.85 * after.training_time_s


# --- records ---------------------------------------------------------------------------------------------------------


@every_engine
def test_each_workers_score_and_their_distance_are_recorded(engine: str, tmp_path: Path) -> None:
    result = run(partial(pull, lr=0.1, num_steps=6), tmp_path, "d-psgd", workers=4, engine=engine, eval_every=3)
    assert [evaluation.iteration for evaluation in result.evaluations] == [0, 3, 6]
    own = {(record.iteration, record.worker): record.value for record in result.logged if record.name == "own_x"}
    distances = {record.iteration: record.value for record in result.logged if record.name == CONSENSUS_DISTANCE}
    for evaluation in result.evaluations:
        at = evaluation.iteration
        models = seen(tmp_path, 4)[at]
        assert [own[at, rank] for rank in range(4)] == models.tolist()
        assert evaluation.metrics["x"] == pytest.approx(float(models.mean()))
        assert distances[at] == pytest.approx(math.sqrt(float((models - models.mean()).square().mean())))
    assert distances[0] == 0
    assert distances[6] > 0


def test_own_scores_can_be_left_out(tmp_path: Path) -> None:
    result = run(partial(pull, lr=0.1, num_steps=2), tmp_path, Gossip(own_scores=False), workers=2)
    assert {record.name for record in result.logged} == {CONSENSUS_DISTANCE}


# --- going on --------------------------------------------------------------------------------------------------------


def train_plainly(worker: Worker, out: Path) -> None:
    model = network()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    worker.evaluation(lambda model: {"sum": float(flat(model).double().sum())})
    for _ in range(20):
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize(
    "strategy",
    [
        Gossip(topology=Chain(), mode="relay", every=2),
        Gossip(topology=Star(), mode="push-sum", order="awc"),
        Gossip(topology=Ring(), quasi_global=0.9),
        Gossip(topology=RandomPairs(), mode="outer", every=2),
        Gossip(topology=Ring(), codec=OneBit(), codec_scope="all"),
    ],
    ids=["relay", "push-sum", "quasi-global", "outer", "one-bit"],
)
def test_a_resumed_run_is_an_uninterrupted_one(strategy: Gossip, tmp_path: Path) -> None:
    """With messages that are to be relayed, weights, momentum and estimates, of which nothing hangs on what lies
    between tensors; evaluations in between change nothing."""
    run(train_plainly, tmp_path / "whole", strategy, workers=4, max_steps=20)
    run(train_plainly, tmp_path / "first", strategy, workers=4, max_steps=9, eval_every=2)
    run(train_plainly, tmp_path / "second", strategy, workers=4, max_steps=20, resume=tmp_path / "first")
    whole, resumed = (
        Checkpoint.decode((tmp_path / name / FILE_NAME).read_bytes(), where=name) for name in ("whole", "second")
    )
    for one, other in zip(whole.workers, resumed.workers, strict=True):
        assert one.own.keys() == other.own.keys()
        assert all(torch.equal(other.own[name], tensor) for name, tensor in one.own.items())


# --- refusals --------------------------------------------------------------------------------------------------------

DIRECTED, APART = networkx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]), networkx.Graph([(0, 1), (2, 3)])


def weighted(*weights: float) -> Graph:
    """A chain."""
    graph = networkx.Graph()
    graph.add_weighted_edges_from((rank, rank + 1, weight) for rank, weight in enumerate(weights))
    return Graph(graph)


@pytest.mark.parametrize("weights", [(1, 1), (0, 1), (-1, 3)])
def test_modes_that_share_models_out_evenly_take_any_weights(weights: tuple[float, ...]) -> None:
    for mode in ("push-sum", "running-sums", "relay"):
        build("gossip", {"topology": weighted(*weights), "mode": mode}).check(num_workers=3)
    build("ad-psgd", {"topology": weighted(*weights)}).check(num_workers=3)


def test_weights_below_zero_are_taken_where_models_come_together() -> None:
    """Xiao and Boyd's best constant weight on a star: the centre counts its own model -1/3 times."""
    star = networkx.star_graph(4)
    networkx.set_edge_attributes(star, 1 / 3, "weight")
    for mode in ("average", "outer"):
        build("gossip", {"topology": Graph(star), "mode": mode}).check(num_workers=5)
    assert Graph(star).contraction(5) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("options", "workers", "reason"),
    [
        ({"mode": "relay"}, 8, "ring is no tree of 8 workers; chain, star and tree are"),
        ({"topology": "hypercube"}, 6, "a power of two of workers, not 6"),
        ({"topology": Graph(DIRECTED)}, 3, "do not keep the mean of all models; use mode=push-sum"),
        ({"topology": Graph(APART)}, 4, "some of 4 workers never hear of some others"),
        ({"topology": weighted(1, 1)}, 3, "the links to worker 1 weigh 2 together, and its own model -1; make them"),
        ({"topology": weighted(1, 1), "mode": "outer"}, 3, "the links to worker 1 weigh 2 together"),
        ({"topology": weighted(-0.5, 0.5)}, 3, "the link from worker 1 to worker 0 has the weight -0.5; take 0 to 1"),
        ({"topology": weighted(0.5, 0)}, 3, "links of weight 0 part them; make their weights larger"),
        ({"topology": weighted(1)}, 2, "keep nothing of their own models, and swap them for ever"),
        ({"topology": weighted(math.nan), "mode": "push-sum"}, 2, "from worker 1 to worker 0 has the weight nan"),
    ],
)
def test_a_topology_without_sense_is_refused(options: dict[str, Any], workers: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build("gossip", options).check(num_workers=workers)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "relay", "order": "awc"}, "order=awc is not for mode=relay"),
        ({"every": "0"}, "every must be at least 1"),
        ({"outer": "nesterov"}, "outer=nesterov has no effect with mode=average; use mode=outer"),
        ({"mode": "outer", "outer.momentum": "-1"}, "outer=momentum:lr=0.7:momentum=-1"),
        ({"mode": "outer", "quasi_global": "0.9"}, "quasi_global is not for mode=outer"),
        ({"mode": "outer", "codec": "int8"}, "mode=outer steps from whole models"),
        ({"quasi_global": "1"}, "quasi_global must be at least 0 and below 1"),
        ({"topology": "toros"}, "did you mean 'torus'"),
        ({"order": "cta"}, "order must be one of atc, awc"),
    ],
)
def test_an_option_without_sense_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build("gossip", options)


def test_quasi_global_momentum_wants_no_other(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="use SGD with momentum=0"):
        run(rows.train, tmp_path, Gossip(quasi_global=0.9), workers=2)


def move_away(worker: Worker, out: Path) -> None:
    model, optimizer, loader = rows.prepared(worker)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)
        model[0].weight.data = model[0].weight.data.clone()


def test_parameters_that_are_moved_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"step 2: parameter '0\.weight' was moved or replaced"):
        run(move_away, tmp_path, "gossip", workers=2)
