"""Asynchronous gossip while simulated hosts fail and others come: each sample counts once, as far as anybody has it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts, Recovery
from paceline.elastic import Elastic
from paceline.errors import RunFailed, UsageError
from paceline.running.result import Result
from tests.conformance.test_virtual_failures import named, require_adding_up

EPOCHS, SAMPLES, WORKERS, BATCH = 3, 96, 4, 4
HOSTS = Hosts(count=5, bandwidth_gbit_per_s=1.0, back_after_s=20.0, price_per_hour=3600.0)
CLUSTER = Cluster(
    hosts=(HOSTS,),
    compute=Compute(step_s=1.0, distribution="log-normal", variation=0.3),
    recovery=Recovery(reform_s=0.25, start_s=2.0),
)
FAILING = replace(CLUSTER, hosts=(replace(HOSTS, preemptions_per_hour=100.0, notice_s=0.0),))
SPOT = replace(CLUSTER, hosts=(replace(HOSTS, preemptions_per_hour=100.0, notice_s=10.0),))

Log = dict[int, list[tuple[int, list[int]]]]
"""By worker, epoch and samples of each batch whose gradient it has computed."""


class Tally(nn.Module):
    """Each gradient takes one from the element of each of its samples, in the model that it is applied to."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return -self.samples[index].sum()


def train(
    out: Path,
    cluster: Cluster,
    *,
    log: Log | None = None,
    options: dict[str, Any] | None = None,
    epochs: int = EPOCHS,
    workers: int = WORKERS,
    eval_every: int = 12,
    resume: Path | None = None,
    max_steps: int | None = None,
    **elastic: Any,
) -> Result:
    def script() -> None:
        worker, model = paceline.init(), Tally()
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
        prepared, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        worker.evaluation(lambda model: {"loss": float(model(torch.arange(SAMPLES)))})
        for epoch in range(epochs):
            for (index,) in loader:
                optimizer.zero_grad()
                prepared(index).backward()
                if log is not None:
                    log.setdefault(worker.rank, []).append((epoch, index.tolist()))
                optimizer.step()

    settings = {"at_least": 1, "at_most": 6, "replacements": 50, "global_batch": "grow", **elastic}
    return paceline.run(
        script,
        strategy="ad-psgd",
        workers=workers,
        options={"topology": "chain", **(options or {})},
        engine="virtual",
        cluster=cluster,
        eval_every=eval_every,
        max_steps=max_steps,
        resume=resume,
        elastic=Elastic(**settings) if settings["at_least"] else None,
        out=out,
    )


def counted(result: Result, log: Log) -> Counter[int]:
    """By sample, how often it counts: of those who are gone, the steps that others have, as the run says. What is left
    of an epoch may be done in a later one of the script's."""
    gone = {event.who: event.details["steps"] for event in result.events if event.name == "let_go"}
    found: Counter[int] = Counter()
    for rank, batches in log.items():
        for _, samples in batches[: gone.get(f"worker-{rank}")]:
            found.update(samples)
    return found


ONCE_AN_EPOCH = Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def require_counted(result: Result, log: Log) -> None:
    assert named(result, "left_over") == []
    assert [(step.worker, step.step) for step in result.steps if step.staleness < 0] == [], (
        "gradients that do not count"
    )
    assert counted(result, log) == ONCE_AN_EPOCH
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES


@pytest.mark.parametrize("cluster", [FAILING, SPOT], ids=["failing", "with notice"])
def test_hosts_fail_and_others_come(tmp_path: Path, cluster: Cluster) -> None:
    """The same run twice, bit for bit."""
    log: Log = {}
    first = train(tmp_path / "first", cluster, log=log)
    second = train(tmp_path / "second", cluster)
    assert len(named(first, "lost" if cluster is FAILING else "left")) > 1
    assert any(event["joined"] for event in named(first, "reformed"))
    require_counted(first, log)
    require_adding_up(first)
    for name in ("steps.csv", "events.jsonl", "model.safetensors"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()


def test_while_nobody_dies_nobody_meets_anew(tmp_path: Path) -> None:
    """Each sample counts once, as without `--elastic`, in as many iterations."""
    log: Log = {}
    static, elastic = (
        train(tmp_path / str(least), CLUSTER, log=log if least else None, at_least=least) for least in (0, 1)
    )
    require_counted(elastic, log)
    assert named(elastic, "reformed") == named(elastic, "let_go") == []
    for result in (static, elastic):
        assert result.evaluations[-1].iteration == EPOCHS * SAMPLES // BATCH
    moves = [load_file(result.directory / "model.safetensors")["samples"].sum() for result in (static, elastic)]
    torch.testing.assert_close(moves[0], moves[1], rtol=1e-9, atol=0.0)  # the mean model keeps each gradient's 1/n


def test_a_run_goes_on_from_its_checkpoint_with_others(tmp_path: Path) -> None:
    train(tmp_path / "first", FAILING, max_steps=20)
    result = train(tmp_path / "second", CLUSTER, workers=3, resume=tmp_path / "first")
    assert named(result, "left_over") == []
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES


def test_too_few_are_left(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="2 workers are left, and --elastic asks for 3 or more"):
        train(tmp_path / "run", FAILING, at_least=3, replacements=0)


def test_a_topology_needs_a_place_for_each_number_of_workers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="may come to have 3 workers, for which it is refused"):
        train(tmp_path / "run", CLUSTER, options={"topology": "ring"}, at_least=2, at_most=4)
