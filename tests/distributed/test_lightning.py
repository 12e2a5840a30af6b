"""An unchanged LightningModule trains under Paceline's strategies as Lightning by itself trains it in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import RunFailed
from tests.conformance import local_engine
from tests.conformance.local_engine import STOP_FILE
from tests.covering import in_turns
from tests.distributed.lightning_script import EPOCHS, alone, by_hand, loss_saved_in, trained
from tests.forks import having_loaded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed (paceline[frameworks])"),
]
LOCK_STEP = ("all-reduce", "ps-bsp:servers=2", "ring")
PRELOADED = ("lightning.pytorch", "pytorch_lightning", "torchmetrics", "paceline.lightning.pytorch_lightning")
FIRST_COMERS = ("async-diloco:every=3", "ps-bsp:backup_workers=1")
FREE = ("ps-asp", "ps-ssp", "gossip", "ad-psgd", "local-sgd:every=2", "diloco:every=2", *FIRST_COMERS)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    with having_loaded(*PRELOADED):
        yield


def assert_alike(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), **CLOSE)
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-4)
    assert found["tested"] == pytest.approx(expected["tested"], abs=1e-4)
    assert (found["steps"], found["epochs"]) == (expected["steps"], expected["epochs"])


@pytest.mark.parametrize(
    ("package", "strategy"), [("pytorch_lightning", "ps-bsp"), *(("lightning.pytorch", name) for name in LOCK_STEP)]
)
def test_workers_in_lock_step_train_what_one_process_trains(package: str, strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path / "two", strategy, package=package)
    assert_alike(found, alone(tmp_path / "one", package=package))
    assert found["world"] == [2, 0, 0, 1]


@pytest.mark.parametrize("strategy", FREE)
def test_workers_that_run_free_validate_and_save_one_model(strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path, strategy, {"val_check_interval": 2})
    other = json.loads((tmp_path / "found-1.json").read_text())
    assert found["tested"] == other["tested"]
    assert found["metrics"] == other["metrics"]
    assert loss_saved_in(tmp_path / "end.ckpt") == pytest.approx(found["tested"]["val_loss"], rel=1e-4)


@pytest.mark.parametrize("strategy", [*LOCK_STEP[:2], "gossip", "local-sgd:every=2"])
def test_weights_that_a_callback_has_validated_train_nothing(strategy: str, tmp_path: Path) -> None:
    settings = {"num_sanity_val_steps": 0}
    found = trained(tmp_path / "averaged", strategy, settings, averages=True)
    expected = trained(tmp_path / "plain", strategy, settings)
    assert found["weights"] == expected["weights"]
    assert found["metrics"]["val_loss"] != expected["metrics"]["val_loss"]


@pytest.mark.parametrize("strategy", ["ps-asp", "ps-bsp", "gossip", "local-sgd:every=2"])
def test_a_checkpoint_that_is_looked_at_after_training_leaves_what_was_trained(strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path, strategy, saves_every=6, looks_at="step=6.ckpt")
    saved, after = found["looked_at"]
    assert loss_saved_in(tmp_path / "step=6.ckpt") == pytest.approx(saved["val_loss"], rel=1e-4)
    assert saved["val_loss"] != found["tested"]["val_loss"]
    assert after == found["tested"]


@pytest.mark.parametrize(
    "strategy", ["gossip", "local-sgd:every=2", "diloco:every=2", "fed-avg:clients=4:fraction=0.5"]
)
def test_lightning_trains_what_a_loop_by_hand_trains(strategy: str, tmp_path: Path) -> None:
    trained(tmp_path, strategy)
    local_engine.run(partial(by_hand, tmp_path), strategy=strategy, workers=2, out=tmp_path)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    expected = torch.load(tmp_path / "hand-0.pt", weights_only=True)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_an_epoch_is_a_round_of_clients(tmp_path: Path) -> None:
    """Of three clients a round one worker plays two, and both validate when the round is over."""
    found = trained(tmp_path, "fed-avg:clients=6:fraction=0.5")
    other = json.loads((tmp_path / "found-1.json").read_text())
    assert found["epochs"] == other["epochs"] == EPOCHS
    assert found["steps"] != other["steps"]
    assert found["steps"] + other["steps"] == EPOCHS * 3 * 2, "a client has two batches"
    assert found["tested"] == other["tested"]
    assert found["metrics"] == other["metrics"]
    assert loss_saved_in(tmp_path / "end.ckpt") == pytest.approx(found["tested"]["val_loss"], rel=1e-4)
    with pytest.raises(RunFailed, match="begin a new run from the weights"):
        trained(tmp_path / "resumed", "fed-avg:clients=6:fraction=0.5", resumes=tmp_path / "end.ckpt")


def test_nobody_knows_the_steps_of_rounds_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"leave trainer\.estimated_stepping_batches out"):
        trained(tmp_path, "fed-avg:clients=6:fraction=0.5", asks_how_many=True)


BESIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({"accumulate_grad_batches": 2}, {}),
    "clipping": ({"gradient_clip_val": 0.1}, {}),
    "manual optimization": ({}, {"manual": True}),
    "early stopping": ({}, {"patience": 1}),
    "logs of steps": ({}, {"step_logs": True}),
    "numbers of steps": ({}, {"asks_how_many": True}),
    "a smaller last batch": ({}, {"samples": 61}),
}


@pytest.mark.parametrize(("strategy", "name"), in_turns(BESIDES, LOCK_STEP[:2]))
def test_what_the_trainer_does_besides(strategy: str, name: str, tmp_path: Path) -> None:
    settings, module = BESIDES[name]
    found = trained(tmp_path / "two", strategy, settings, **module)
    expected = alone(tmp_path / "one", settings, **module)
    assert_alike(found, expected)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp", "gossip", "local-sgd:every=2"])
def test_a_resumed_run_equals_an_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", strategy, shuffle=True, saves_every=6)
    trained(tmp_path / "first", strategy, {"max_epochs": 1}, shuffle=True)
    for number, saved in enumerate(["whole/step=6.ckpt", "first/end.ckpt"]):  # within an epoch, and after one
        resumed = trained(tmp_path / f"resumed-{number}", strategy, shuffle=True, resumes=tmp_path / saved)
        assert resumed["weights"] == whole["weights"]
        assert (resumed["steps"], resumed["epochs"]) == (whole["steps"], whole["epochs"])


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp", "local-sgd:every=2"])
def test_a_job_of_slurm_goes_on_by_itself(strategy: str, tmp_path: Path) -> None:
    """Where workers have a common step, from the one at which the run was interrupted."""
    whole = trained(tmp_path / "whole", strategy, shuffle=True)
    cut = trained(tmp_path / "job", strategy, shuffle=True, job="1", stops_at=5)
    assert cut["steps"] < whole["steps"]
    assert (tmp_path / "job" / "hpc_ckpt_1.ckpt").exists()
    (tmp_path / "job" / STOP_FILE).unlink()
    resumed = trained(tmp_path / "job", strategy, shuffle=True, job="1")
    assert resumed["epochs"] == whole["epochs"]
    assert not list((tmp_path / "job").glob("hpc*"))
    if strategy != "local-sgd:every=2":
        assert (resumed["weights"], resumed["steps"]) == (whole["weights"], whole["steps"])


def test_a_job_takes_and_deletes_only_its_own_file(tmp_path: Path) -> None:
    saved = tmp_path / "hpc_ckpt_1.ckpt"
    trained(tmp_path, "all-reduce", shuffle=True, job="1", stops_at=5)
    (tmp_path / STOP_FILE).unlink()
    before = saved.read_bytes()
    with pytest.raises(
        RunFailed, match=r"this is job 2, and .*hpc_ckpt_1\.ckpt, .* is of job 1: give .*root_dir=\.\.\."
    ):
        trained(tmp_path, "all-reduce", shuffle=True, job="2")
    moved = saved.rename(tmp_path / "from-job-1.ckpt")
    resumed = trained(tmp_path, "all-reduce", shuffle=True, job="2", resumes=moved)
    assert moved.read_bytes() == before
    assert resumed["epochs"] == EPOCHS


def test_the_file_of_a_job_may_lie_anywhere(tmp_path: Path) -> None:
    """At an address of fsspec's, too; each task of an array of jobs is a job of its own."""
    address = f"file://{tmp_path}"
    trained(tmp_path, "all-reduce", {"default_root_dir": address}, shuffle=True, job="1", stops_at=5)
    (tmp_path / STOP_FILE).unlink()
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
    trained(tmp_path, "all-reduce", {"default_root_dir": address}, shuffle=True, job="1")
    assert not (tmp_path / "hpc_ckpt_1.ckpt").exists()


@pytest.mark.parametrize(
    ("average", "strategy"), in_turns(["all-reduce", "gossip", "local-sgd:every=2", "diloco:every=2"], ["ema", "swa"])
)
def test_averages_of_weights_are_of_all_workers(strategy: str, average: str, tmp_path: Path) -> None:
    """A run that is resumed validates, and ends with, what an undisturbed one does; so does each of its workers."""
    script = {"shuffle": True, "average": average}
    whole = trained(tmp_path / "whole", strategy, saves_every=6, **script)
    plain = trained(tmp_path / "plain", strategy, shuffle=True)
    assert whole["tested"] != plain["tested"]
    other = json.loads((tmp_path / "whole" / "found-1.json").read_text())
    assert (whole["metrics"], whole["tested"]) == (other["metrics"], other["tested"])
    assert loss_saved_in(tmp_path / "whole" / "end.ckpt") == pytest.approx(whole["tested"]["val_loss"], rel=1e-4)
    resumed = trained(tmp_path / "resumed", strategy, resumes=tmp_path / "whole" / "step=6.ckpt", **script)
    assert resumed["weights"] == whole["weights"]
    assert (resumed["metrics"], resumed["tested"]) == (whole["metrics"], whole["tested"])


def test_lightning_alone_goes_on_from_what_servers_held(tmp_path: Path) -> None:
    trained(tmp_path / "first", "ps-bsp:servers=2", {"max_epochs": 2})
    resumed = alone(tmp_path / "second", resumes=tmp_path / "first" / "end.ckpt")
    assert_alike(resumed, alone(tmp_path / "whole"))


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp", "local-sgd:every=4"])
def test_a_trial_of_two_batches(strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path, strategy, {"fast_dev_run": 2})
    assert (found["steps"], found["epochs"]) == (2, 1)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_the_runs_budget_ends_the_trainer(strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path, strategy, {"max_epochs": -1}, max_steps=10)
    assert found["epochs"] <= 3
    assert found["steps"] <= 10


@pytest.mark.parametrize(
    ("strategy", "settings", "script", "remedy"),
    [
        ("horovod", {}, {}, "the script itself exchanges, .* choose another strategy, such as all-reduce"),
        ("ps-asp", {}, {"step_logs": True}, "on_step=False"),
        ("ps-bsp", {}, {"average": "ema"}, "use all-reduce, gossip or local updates"),
        ("ps-asp", {}, {"average": "swa"}, "use all-reduce, gossip or local updates"),
        ("ps-asp", {}, {"asks_for": "ps-ssp"}, "--strategy ps-ssp"),
        ("ps-asp:servers=2", {}, {"asks_for": "ps-asp"}, "is started under ps-asp:servers=2: start it"),
        ("fed-avg:clients=2:fraction=0.5", {}, {}, "has no client for rank 1"),
        ("fed-avg:clients=2:fraction=1", {"val_check_interval": 2}, {}, "a number of rounds"),
        ("fed-avg:clients=2:fraction=1", {"fast_dev_run": True}, {}, r"fast_dev_run=.* give max_epochs"),
        ("all-reduce", {"devices": 3}, {}, "--workers"),
        ("all-reduce", {"num_nodes": 2}, {}, "leave it out"),
        ("all-reduce", {"sync_batchnorm": True}, {}, "leave it out"),
        ("all-reduce", {"reload_dataloaders_every_n_epochs": 1}, {}, "reload_dataloaders_every_n_epochs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    strategy: str, settings: dict[str, Any], script: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match=remedy):
        trained(tmp_path, strategy, settings, **script)
