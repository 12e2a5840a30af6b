"""Simulated hosts fail, are taken away and come under rounds of a quorum: what a worker has pushed counts in one round,
the same on all servers, and what it has trained on since is trained on by others."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster
from paceline.elastic import Elastic
from paceline.errors import UsageError
from paceline.records import UpdateRecord, read_records
from paceline.running.result import Result
from paceline.server.client_core import ClientCore
from paceline.server.spec import Push
from tests.conformance.test_virtual_failures import named, require_adding_up
from tests.conformance.test_virtual_servers_outlive import (
    BATCH,
    CLUSTER,
    EPOCHS,
    SAMPLES,
    SERVERS_HOSTS,
    WORKERS_HOSTS,
)
from tests.covering import in_turns

EVERY, WORKERS = 3, 4
MANY = replace(WORKERS_HOSTS, count=7)
FAILING = replace(CLUSTER, hosts=(replace(MANY, preemptions_per_hour=100.0, notice_s=0.0), SERVERS_HOSTS))
SPOT = replace(CLUSTER, hosts=(replace(MANY, preemptions_per_hour=100.0, notice_s=10.0), SERVERS_HOSTS))
Log = dict[int, list[list[int]]]
"""By worker, the samples of each batch that it has computed."""
Pushes = dict[tuple[int, int], tuple[int, float]]
"""By worker and clock: the steps that the worker has taken when this change counts, and its weight."""


class Tally(nn.Module):
    """Each step adds one to an element of each half for each of its samples, so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ParameterList([torch.zeros(SAMPLES, dtype=torch.float64) for _ in range(2)])

    def forward(self, index: Tensor) -> Tensor:
        loss: Tensor = -self.halves[0][index].sum() - self.halves[1][index].sum()
        return loss


def train(out: Path, cluster: Cluster, *, log: Log | None = None, at_least: int = 1, **options: Any) -> Result:
    def script() -> None:
        worker, model = paceline.init(), Tally()
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
        prepared, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        worker.evaluation(lambda model: {"loss": float(model(torch.arange(SAMPLES)))})
        for _ in range(EPOCHS):
            for (index,) in loader:
                optimizer.zero_grad()
                prepared(index).backward()
                if log is not None:
                    log.setdefault(worker.rank, []).append(index.tolist())
                optimizer.step()

    elastic = Elastic(at_least=at_least, at_most=5, replacements=50, global_batch="grow") if at_least else None
    return paceline.run(
        script,
        strategy="async-diloco",
        workers=WORKERS,
        options={"every": EVERY, "outer": "average", "servers": 2, **options},
        engine="virtual",
        cluster=cluster,
        eval_every=6,
        checkpoint_every=6,
        elastic=elastic,
        out=out,
    )


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> Pushes:
    found: Pushes = {}
    exchange = ClientCore.exchange

    def noted(client: ClientCore, push: Push) -> Any:
        assert push.done is not None
        found[client.rank, client.clock] = push.done.steps, push.weight
        return exchange(client, push)

    monkeypatch.setattr(ClientCore, "exchange", noted)
    return found


def rounds_of(result: Result) -> list[list[tuple[int, int]]]:
    """Worker and clock of each change, round by round; the same on both servers."""
    on_each = []
    for server in range(2):
        made = defaultdict(list)
        for each in read_records(result.directory, UpdateRecord):
            if each.server == server:
                made[each.iteration].append((each.worker, each.clock))
        on_each.append([sorted(made[number]) for number in sorted(made)])
    assert on_each[0] == on_each[1]
    assert set(Counter(change for made in on_each[0] for change in made).values()) == {1}
    return on_each[0]


def require_counted(result: Result, log: Log, pushes: Pushes) -> None:
    """Each sample is in the changes that count as often as there are epochs, and the model is what one process makes of
    the same rounds."""
    assert named(result, "left_over") == []
    before, model, counts = Counter[int](), torch.zeros(SAMPLES, dtype=torch.float64), Counter[int]()
    for made in rounds_of(result):
        changes, weights = [], []
        for worker, clock in made:
            upto, weight = pushes[worker, clock]
            samples = [index for batch in log[worker][before[worker] : upto] for index in batch]
            before[worker] = upto
            counts.update(samples)
            changes.append(torch.bincount(torch.tensor(samples), minlength=SAMPLES).double())
            weights.append(weight)
        model += torch.stack([w * each for w, each in zip(weights, changes, strict=True)]).sum(0) / sum(weights)
    assert counts == dict.fromkeys(range(SAMPLES), EPOCHS)
    for half in result.model_state().values():
        torch.testing.assert_close(half, model, rtol=1e-9, atol=1e-9)
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES


ROUNDS = [{}, {"quorum": 2, "at_least": 2}, {"grace_s": 0.3, "at_least": 2}]


@pytest.mark.parametrize(("how", "options"), in_turns(ROUNDS, ("failing", "with notice"), are_quick=True), ids=str)
def test_hosts_fail_and_others_come(tmp_path: Path, pushes: Pushes, how: str, options: dict[str, Any]) -> None:
    """The same run twice, bit for bit."""
    cluster = FAILING if how == "failing" else SPOT
    log: Log = {}
    first = train(tmp_path / "first", cluster, log=log, **options)
    require_counted(first, log, pushes)
    assert len(named(first, "lost" if cluster is FAILING else "left")) > 1
    assert named(first, "let_in")
    require_adding_up(first)
    second = train(tmp_path / "second", cluster, **options)
    for name in ("steps.csv", "updates.csv", "events.jsonl", "model.safetensors"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()


@pytest.mark.parametrize("quorum", [1, 2])
def test_while_nobody_dies_it_is_the_static_run(tmp_path: Path, quorum: int) -> None:
    """But for the time of the messages by which several servers elsewhere count a push whole."""
    static = train(tmp_path / "static", CLUSTER, at_least=0, quorum=quorum)
    elastic = train(tmp_path / "elastic", CLUSTER, at_least=quorum, quorum=quorum)
    for name in ("updates.csv", "model.safetensors"):
        assert (static.directory / name).read_bytes() == (elastic.directory / name).read_bytes()


def test_numbers_of_workers_that_cannot_make_a_quorum_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"may come to have 1 workers.*quorum=2 is more than 1"):
        train(tmp_path / "run", CLUSTER, at_least=1, quorum=2)
    with pytest.raises(UsageError, match="an exchange is of as many local steps"):
        paceline.run(lambda: None, strategy="async-diloco", workers=2, elastic="1:2", global_batch="keep")
