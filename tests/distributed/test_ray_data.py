"""Data that Ray has split trains as one process with all of it, whatever the parts' sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import paceline
from paceline.engines import world
from paceline.errors import RunFailed, UsageError
from paceline.running.launch import Quiet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("pyarrow") is None, reason="Ray Data is not installed (paceline[ray-data])"),
]
ROWS, EPOCHS, LR = 61, 3, 0.1


@pytest.fixture(scope="module")
def dataset(ray_here: None) -> Any:
    ray.data.DataContext.get_current().enable_progress_bars = False
    x = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(np.float32)
    rows = [{"id": i, "x": x[i], "y": x[i].sum(keepdims=True)} for i in range(ROWS)]
    return ray.data.from_items(rows, override_num_blocks=4)


def test_a_loader_before_init_says_what_is_missing() -> None:
    from paceline import ray_data

    with pytest.raises(UsageError, match=r"call paceline.init\(\) before ray_data.loader\(\)"):
        ray_data.loader([object(), object()])  # type: ignore[list-item]


def descent(dataset: Any) -> torch.Tensor:
    """The weights that gradient descent over all rows finds in one process."""
    rows = dataset.take_all()
    x, y = (torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("x", "y"))
    weight = torch.zeros(1, 3)
    for _ in range(EPOCHS):
        weight -= LR * 2 * (x @ weight.T - y).T @ x / ROWS
    return weight


def train(parts: Sequence[Any], out: Path, *, batch_size: int = ROWS) -> None:
    from paceline import ray_data

    worker = paceline.init()
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    loader = ray_data.loader(parts, batch_size=batch_size)
    model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=LR), loader)
    for epoch in range(EPOCHS):
        seen: list[int] = []
        for batch in loader:
            optimizer.zero_grad()
            (model(batch["x"]) - batch["y"]).square().mean().backward()
            optimizer.step()
            seen += batch["id"].tolist()
        (out / f"epoch-{epoch}-rank-{worker.rank}.json").write_text(json.dumps(seen))
    if worker.rank == 0:
        torch.save(model.weight.detach(), out / "weight.pt")


def seen_in(out: Path, epoch: int) -> list[int]:
    """By all workers in an epoch."""
    return sorted(i for path in out.glob(f"epoch-{epoch}-*.json") for i in json.loads(path.read_text()))


def test_uneven_parts_train_as_one_process_does(dataset: Any, tmp_path: Path) -> None:
    parts = dataset.split_at_indices([40])
    paceline.run(partial(train, parts, tmp_path), workers=2, insecure=True, out=tmp_path / "run")
    torch.testing.assert_close(torch.load(tmp_path / "weight.pt"), descent(dataset), atol=1e-5, rtol=1e-5)
    assert all(seen_in(tmp_path, epoch) == list(range(ROWS)) for epoch in range(EPOCHS))


def test_a_streaming_split_trains_on_every_row_but_the_odd_one(dataset: Any, tmp_path: Path) -> None:
    parts = dataset.streaming_split(2, equal=True)
    paceline.run(partial(train, parts, tmp_path, batch_size=8), workers=2, insecure=True, out=tmp_path / "run")
    for epoch in range(EPOCHS):
        seen = seen_in(tmp_path, epoch)
        assert len(seen) == len(set(seen)) == ROWS - 1


def test_under_asynchronous_servers_each_worker_reads_its_part_to_its_end(dataset: Any, tmp_path: Path) -> None:
    parts = dataset.split_at_indices([40])
    paceline.run(
        partial(train, parts, tmp_path, batch_size=8), strategy="ps-asp", workers=2, insecure=True, out=tmp_path / "run"
    )
    assert all(seen_in(tmp_path, epoch) == list(range(ROWS)) for epoch in range(EPOCHS))


def test_workers_that_are_not_in_step_cannot_share_a_streaming_split(dataset: Any, tmp_path: Path) -> None:
    program = partial(train, dataset.streaming_split(2, equal=True), tmp_path)
    with pytest.raises((UsageError, RunFailed), match=r"not in step.*use dataset\.split\(2\)"):
        paceline.run(program, strategy="ps-asp", workers=2, insecure=True, out=tmp_path / "run")
    with pytest.raises((UsageError, RunFailed), match=r"engine virtual.*use dataset\.split\(2\)"):
        paceline.run(program, workers=2, engine="virtual", cluster="lab-1gbe", out=tmp_path / "virtual")


def train_impatiently(parts: Sequence[Any], out: Path) -> None:
    from paceline import ray_data

    ray_data.NOTICE_S, ray_data.GIVE_UP_S = 0.5, 2.0
    train(parts, out)


def test_a_run_that_leaves_ray_data_no_core_says_so_and_ends(
    dataset: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its workers hold all cores, and the rows are still to be made by a task."""
    program = partial(train_impatiently, dataset.map(dict).streaming_split(4, equal=True), tmp_path)
    remedy = r"no batch has come from Ray Data for \d+ s: .* 0 of the cluster's 4 are free, .* hold 4; start Ray"
    with pytest.raises((UsageError, RunFailed), match=remedy):
        paceline.run(program, workers=4, insecure=True, out=tmp_path / "run", watcher=Quiet())
    assert re.search(r"\[worker-\d\] has waited \d+ s for its first batch from Ray Data", capsys.readouterr().out)


def test_the_virtual_engine_trains_on_parts(dataset: Any, tmp_path: Path) -> None:
    program = partial(train, dataset.split_at_indices([40]), tmp_path)
    paceline.run(program, workers=2, engine="virtual", cluster="lab-1gbe", out=tmp_path / "run")
    torch.testing.assert_close(torch.load(tmp_path / "weight.pt"), descent(dataset), atol=1e-5, rtol=1e-5)


def test_a_script_alone_takes_the_whole_and_no_other_number_of_parts(dataset: Any, tmp_path: Path) -> None:
    train([dataset], tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "weight.pt"), descent(dataset), atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="2 parts of Ray's data are given to 1 workers: split it into 1"):
        train(dataset.split(2), tmp_path)
    world.enter(None)
