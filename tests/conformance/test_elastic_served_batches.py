"""Simulated hosts fail, leave and come under `ps-bsp` with `--global-batch keep`: each update is of its whole global
batch, in as many rounds as those who are there need, and the model is the undisturbed run's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster
from paceline.elastic import Elastic, Member
from paceline.engines.virtual.survival.reforming import VirtualReforming
from paceline.membership import Membership
from paceline.nn import ShardedEmbedding
from paceline.records import UpdateRecord, read_records
from paceline.running.result import Result
from paceline.server.whole_updates import Took
from paceline.training.sharding.loader import ShardedLoader
from paceline.training.whole_batches import WholeBatches
from tests.conformance.test_virtual_failures import named, require_adding_up
from tests.conformance.test_virtual_servers_outlive import (
    CLUSTER,
    FAILING,
    SERVERS_HOSTS,
    SPOT,
    WORKERS,
    WORKERS_HOSTS,
)
from tests.covering import in_turns

EPOCHS, SAMPLES, BATCH = 3, 100, 4
UPDATES = EPOCHS * -(-SAMPLES // (BATCH * WORKERS))
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def make(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer, Any, TensorDataset]:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(SAMPLES, 10, generator=generator), torch.arange(SAMPLES) % 4
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
    update = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(update, 0.97)
    return model, update, scheduler, TensorDataset(inputs, labels, torch.arange(SAMPLES))


def undisturbed(optimizer: str, *, seed: int = 0) -> dict[str, Tensor]:
    """What one process makes of all workers' batches joined."""
    model, update, scheduler, data = make(optimizer)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    parts = [ShardedLoader(loader, rank=rank, size=WORKERS, seed=seed) for rank in range(WORKERS)]
    for epoch in range(EPOCHS):
        for each in zip(*(part.batches(epoch) for part in parts), strict=True):
            index = [sample for part in each for sample in part.samples]
            update.zero_grad()
            F.cross_entropy(model(data.tensors[0][index]), data.tensors[1][index]).backward()
            update.step()
            scheduler.step()
    return model.state_dict()


SPOT_HOSTS = replace(WORKERS_HOSTS, name="spot", count=4, preemptions_per_hour=200.0, notice_s=0.0, back_after_s=2.0)
SOME_STAY = (replace(WORKERS_HOSTS, count=1), SPOT_HOSTS, SERVERS_HOSTS)


class Seen:
    """What scripts have written down."""

    def __init__(self) -> None:
        self.samples = Counter[int]()
        self.changed: list[tuple[bool, bool]] = []
        """Of each step: whether the model is another one after it, and whether the learning rate is."""


def train(
    out: Path,
    cluster: Cluster,
    *,
    optimizer: str = "momentum",
    seen: Seen | None = None,
    elastic: dict[str, Any] | None = None,
    is_elastic: bool = True,
    **given: Any,
) -> Result:
    wanted = Elastic(**{"at_least": 1, "at_most": 5, "replacements": 50, **(elastic or {})})

    def script() -> None:
        worker = paceline.init()
        model, update, scheduler, data = make(optimizer)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        model, update, loader = worker.prepare(model, update, loader, scheduler=scheduler)
        worker.evaluation(lambda model: {"loss": float(F.cross_entropy(model(data.tensors[0]), data.tensors[1]))})
        for _ in range(EPOCHS):
            for x, y, index in loader:
                update.zero_grad()
                F.cross_entropy(model(x), y).backward()
                before, rate = model[0].weight.detach().clone(), update.param_groups[0]["lr"]
                update.step()
                scheduler.step()
                if seen is not None:
                    has_changed = not torch.equal(before, model[0].weight)
                    seen.changed.append((has_changed, update.param_groups[0]["lr"] != rate))
                    seen.samples.update(index.tolist())

    return paceline.run(
        script,
        engine="virtual",
        cluster=cluster,
        elastic=wanted if is_elastic else None,
        out=out,
        **{
            "strategy": "ps-bsp",
            "workers": WORKERS,
            "options": {"servers": 2},
            "eval_every": 4,
            "checkpoint_every": None if "max_steps" in given else 4,
            **given,
        },
    )


def require_undisturbed_model(result: Result, optimizer: str = "momentum", *, seed: int = 0) -> None:
    saved = load_file(result.directory / "model.safetensors")
    for name, wanted in undisturbed(optimizer, seed=seed).items():
        torch.testing.assert_close(saved[name], wanted, rtol=1e-4, atol=1e-5)


def require_undisturbed(result: Result, optimizer: str = "momentum", *, seed: int = 0) -> None:
    """Each update has all its samples, on both servers."""
    require_undisturbed_model(result, optimizer, seed=seed)
    assert result.evaluations[-1].iteration == UPDATES
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES
    for each in result.evaluations:
        epochs, more = divmod(each.iteration, UPDATES // EPOCHS)
        assert each.samples == epochs * SAMPLES + more * BATCH * WORKERS
    counted = Counter((each.server, each.worker, each.clock) for each in read_records(result.directory, UpdateRecord))
    assert set(counted.values()) == {1}
    on_each = [{each[1:] for each in counted if each[0] == server} for server in range(2)]
    assert on_each[0] == on_each[1]
    assert named(result, "left_over") == []


@pytest.mark.parametrize(("how", "optimizer"), in_turns(OPTIMIZERS, ("failing", "with notice"), are_quick=True))
def test_hosts_fail_and_others_come(tmp_path: Path, how: str, optimizer: str) -> None:
    """The same run twice, bit for bit."""
    cluster = FAILING if how == "failing" else SPOT
    first, second = (train(tmp_path / name, cluster, optimizer=optimizer) for name in ("first", "second"))
    assert len(named(first, "lost" if cluster is FAILING else "left")) > 1
    assert named(first, "let_in")
    require_undisturbed(first, optimizer)
    require_adding_up(first)
    for name in ("steps.csv", "updates.csv", "events.jsonl", "model.safetensors"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()


def rounds_of(result: Result) -> dict[int, set[int]]:
    """By update, the clocks of the first server whose gradients it was made of."""
    found: dict[int, set[int]] = {}
    for each in read_records(result.directory, UpdateRecord):
        if each.server == 0:
            found.setdefault(each.iteration, set()).add(each.clock)
    return found


def test_until_all_samples_are_there_nothing_changes(tmp_path: Path) -> None:
    """Neither the model, nor what a prepared scheduler sets; then both do."""
    seen = Seen()
    result = train(tmp_path / "run", FAILING, seen=seen)
    require_undisturbed(result)
    assert any(len(clocks) > 1 for clocks in rounds_of(result).values())
    assert {*seen.changed} == {(True, True), (False, False)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_while_nobody_dies_it_is_the_static_run(tmp_path: Path, optimizer: str) -> None:
    """Bit for bit, where the last batches of an epoch are smaller, too."""
    elastic = train(tmp_path / "elastic", CLUSTER, optimizer=optimizer)
    assert all(len(clocks) == 1 for clocks in rounds_of(elastic).values())
    static = train(tmp_path / "static", CLUSTER, optimizer=optimizer, is_elastic=False)
    saved, wanted = (load_file(each.directory / "model.safetensors") for each in (elastic, static))
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("late_s", [3.0, 20.0])
def test_who_joins_goes_through_what_it_has_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """It is slow to take up what another has given it, while the others train on, into the next epoch too. Its
    scheduler lags until the next pause; the others' count."""
    enter, admitted, missed = VirtualReforming.enter, WholeBatches.admitted, list[int]()

    def slowly(reforming: VirtualReforming, member: Member) -> Membership:
        reforming._process.compute(late_s)
        return enter(reforming, member)

    def noted(batches: WholeBatches, *, clock: int, took: Sequence[Took]) -> None:
        if batches._is_behind:
            missed.append(clock - batches._dealt.num_done)
        admitted(batches, clock=clock, took=took)

    monkeypatch.setattr(VirtualReforming, "enter", slowly)
    monkeypatch.setattr(WholeBatches, "admitted", noted)
    result = train(tmp_path / "run", replace(CLUSTER, hosts=SOME_STAY), eval_every=14, checkpoint_every=None)
    assert max(missed) >= (UPDATES // EPOCHS if late_s > 10 else 1), missed
    require_undisturbed(result)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**16),
    per_hour=st.sampled_from([100.0, 300.0, 600.0]),
    notice_s=st.sampled_from([0.0, 0.5, 10.0]),
    codec=st.sampled_from([None, "top-k:ratio=1"]),
)
def test_whatever_the_schedule_the_model_is_the_undisturbed_one(
    tmp_path_factory: pytest.TempPathFactory, seed: int, per_hour: float, notice_s: float, codec: str | None
) -> None:
    """Failures are drawn from the seed, as the order of the data is. A codec that leaves out nothing changes nothing.
    One host stays."""
    spot = replace(SPOT_HOSTS, preemptions_per_hour=per_hour, notice_s=notice_s)
    cluster = replace(CLUSTER, hosts=(SOME_STAY[0], spot, SERVERS_HOSTS))
    options = {"servers": 2} | ({} if codec is None else {"codec": codec})
    result = train(tmp_path_factory.mktemp("run"), cluster, seed=seed, options=options)
    require_undisturbed(result, seed=seed)


@pytest.mark.parametrize("steps", [UPDATES // EPOCHS, 14])
def test_a_run_goes_on_from_its_checkpoint_with_any_number(tmp_path: Path, steps: int) -> None:
    """Also from where an update was half done, whose samples are dealt anew; and under all-reduce."""
    first = train(tmp_path / "first", FAILING, max_steps=steps)
    assert first.evaluations[-1].iteration == steps
    for name, strategy, workers in [("same", "ps-bsp", WORKERS), ("more", "ps-bsp", 5), ("ring", "all-reduce", 2)]:
        given = {"workers": workers, "strategy": strategy, "resume": first.directory}
        options = {"servers": 2} if strategy == "ps-bsp" else {}
        require_undisturbed_model(train(tmp_path / name, CLUSTER, options=options, **given))


def every_second(optimizer: torch.optim.Optimizer, number: int) -> None:
    if number % 2:
        optimizer.step()


def but_the_third(optimizer: torch.optim.Optimizer, number: int) -> None:
    if number != 2:
        optimizer.step()


@pytest.mark.parametrize("step", [every_second, but_the_third])
def test_scripts_that_step_after_several_batches_or_none_are_refused(tmp_path: Path, step: Any) -> None:
    def script() -> None:
        worker = paceline.init()
        model, update, scheduler, data = make("sgd")
        loader = DataLoader(data, batch_size=BATCH)
        model, update, loader = worker.prepare(model, update, loader, scheduler=scheduler)
        for number, (x, y, _) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            step(update, number)

    with pytest.raises(paceline.UsageError, match=r"step after each batch .* or use --global-batch grow"):
        paceline.run(
            script,
            strategy="ps-bsp",
            workers=2,
            engine="virtual",
            cluster=CLUSTER,
            elastic="1:2",
            global_batch="keep",
            out=tmp_path,
        )


@pytest.mark.parametrize(
    ("options", "rows", "words"),
    [
        (
            {"codec": "sign", "codec_scope": "all"},
            False,
            "joined by a vote of all workers, which rounds of some cannot",
        ),
        ({}, True, "rows of a ShardedEmbedding are updated in each round; use --global-batch grow"),
    ],
)
def test_what_cannot_be_added_up_is_refused(tmp_path: Path, options: dict[str, str], rows: bool, words: str) -> None:
    def script() -> None:
        worker = paceline.init()
        model: Any = nn.ModuleList([nn.Linear(1, 1), *([ShardedEmbedding(8, 1, optimizer="sgd:lr=1")] if rows else [])])
        loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=1)
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)

    with pytest.raises(paceline.UsageError, match=words):
        paceline.run(
            script,
            strategy="ps-bsp",
            options=options,
            workers=2,
            engine="virtual",
            cluster=CLUSTER,
            elastic="1:2",
            global_batch="keep",
            out=tmp_path,
        )
