"""Ray Tune's own Tuner on two cores, whose trials are runs; and the examples of Ray's libraries."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import iteration_of
from tests.distributed.harness import Command, events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("pyarrow") is None, reason="Ray Tune is not installed (paceline[ray-data])"),
]
SCRIPT = """
import argparse, pathlib, time, torch, paceline
from paceline.nn import ShardedEmbedding
from torch.utils.data import DataLoader, TensorDataset


class Model(torch.nn.Module):
    def __init__(self, has_rows):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
        table = {"optimizer": "row-wise-adagrad:lr=0.1", "name": "users"}
        self.table = ShardedEmbedding(2**40, 4, **table) if has_rows else None

    def forward(self, x, keys):
        return self.line(x if self.table is None else x + self.table(keys))


def train(config):
    worker = paceline.init()
    torch.manual_seed(1)
    x = torch.randn(64, 4)
    y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    keys = torch.arange(64) % 16 * 2**30
    model = Model(config.get("rows"))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    data = DataLoader(TensorDataset(x, keys, y), batch_size=8, shuffle=True)
    model, optimizer, data = worker.prepare(model, optimizer, data)
    threads = torch.get_num_threads()
    worker.evaluation(lambda model: {"loss": float((model(x, keys) - y).square().mean()), "threads": threads})
    steps, has_failed = 0, pathlib.Path("has_failed")
    while not worker.is_over:
        for inputs, some, wanted in data:
            optimizer.zero_grad()
            (model(inputs, some) - wanted).square().mean().backward()
            optimizer.step()
            time.sleep(config.get("pause_s", 0.0))
            steps += 1
            if steps == config.get("fail-at") and not has_failed.exists():
                has_failed.touch()
                raise ValueError("as it was asked to")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--rows", type=int)
    train({name.replace("_", "-"): value for name, value in vars(parser.parse_args()).items()})
"""
TUNE = """
import json
from pathlib import Path
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from paceline.tune import trainable
from script import train

STORAGE = str(Path("storage").resolve())
FILES = {"option.table_dir": str(Path("tables").resolve()), "option.table_mbytes": 1}  # rows lie beside checkpoints


def rows(results):
    for result in results:
        seen = result.metrics_dataframe
        yield {
            "trial": result.metrics["trial_id"],
            "error": str(result.error or ""),
            "threads": result.metrics["threads"],
            **{name: seen[name].tolist() for name in ("iteration", "loss", "timestamp")},
        }


def run_config(name):
    every = tune.CheckpointConfig(checkpoint_frequency=1)
    return tune.RunConfig(name=name, storage_path=STORAGE, checkpoint_config=every, verbose=0)


def actors():
    return [(actor["ActorClassName"], actor["State"]) for actor in ray._private.state.actors().values()]


ray.init()
stopping = tune.Tuner(
    trainable(train, eval_every=4, max_steps=40, cpus=2, out="runs"),
    param_space={"lr": tune.grid_search([0.02, 1e-9]), "pause_s": 0.2},
    tune_config=tune.TuneConfig(
        scheduler=ASHAScheduler(metric="loss", mode="min", grace_period=3, max_t=1000, reduction_factor=2)
    ),
    run_config=run_config("stopping"),
)
found = {"stopping": list(rows(stopping.fit())), "actors": actors()}
runs = trainable("script.py", eval_every=4, max_steps=24, strategy="ps-bsp", cpus=0.5)
failing = tune.Tuner(
    runs,
    param_space={"lr": 0.05, "rows": 1, "fail-at": tune.grid_search([0, 14]), "option.servers": 1, **FILES},
    run_config=run_config("failing"),
)
found["failing"] = list(rows(failing.fit()))
restored = tune.Tuner.restore(f"{STORAGE}/failing", runs, resume_errored=True)
found["restored"] = list(rows(restored.fit()))
Path("found.json").write_text(json.dumps(found))
"""
EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(directory: Path, cluster: str, programs: str, *program: str) -> str:
    """What a program says, of which nothing is left."""
    command = Command([f"{programs}/python", *program], directory, {"RAY_ADDRESS": cluster})
    try:
        output = command.wait()
        assert command.status == 0, output
        command.assert_nothing_left()
    finally:
        command.close()
    return output


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def found(directory: Path, cluster: str, program_forks: str) -> Any:
    """What two experiments, and one of them restored, found."""
    (directory / "script.py").write_text(SCRIPT)
    (directory / "tuning.py").write_text(TUNE)
    output_of(directory, cluster, program_forks, "tuning.py")
    return json.loads((directory / "found.json").read_text())


def test_evaluations_are_reported_as_they_are_made(found: Any) -> None:
    good, _ = found["stopping"]
    assert not good["error"]
    assert good["iteration"] == list(range(0, 41, 4))
    assert good["loss"][-1] < 0.1 * good["loss"][0]
    assert good["timestamp"][-1] - good["timestamp"][0] >= 2  # of the 8 s that its steps take


def test_a_run_has_the_cores_of_its_trial_s_placement_group(found: Any) -> None:
    """A trial of the first experiment takes all cores there are, so that its run found none elsewhere."""
    assert [row["threads"] for row in found["stopping"]] == [2, 2]
    assert [row["threads"] for row in found["failing"]] == [1, 1]


def test_a_trial_that_asha_stops_saves_itself_and_ends(found: Any, directory: Path) -> None:
    _, poor = found["stopping"]
    assert poor["iteration"] == [0, 4, 8]
    (run,) = (directory / "runs").glob(f"{poor['trial']}-*")
    happened = events(run)
    assert "interrupted" in [event["name"] for event in happened]
    saved = max(event["iteration"] for event in happened if event["name"] == "checkpoint")
    assert 8 <= saved < 40
    assert iteration_of(run / FILE_NAME) == saved
    assert [state for name, state in found["actors"] if name == "WorkerActor"] == ["DEAD", "DEAD"]


def test_a_restored_trial_goes_on_as_if_nothing_had_happened(found: Any) -> None:
    whole, failed = found["failing"]
    assert not whole["error"]
    assert "as it was asked to" in failed["error"]
    restored = found["restored"][1]
    assert not restored["error"]
    assert restored["iteration"] == sorted(set(restored["iteration"]))  # it did not begin again
    assert len(restored["iteration"]) > len(failed["iteration"])
    assert restored["iteration"][-1] == 24
    assert restored["loss"][-1] == whole["loss"][-1]  # of the table's rows, too


def test_the_example_finds_a_good_learning_rate(tmp_path: Path, cluster: str, program_forks: str) -> None:
    example = str(EXAMPLES / "tune_text.py")
    said = re.search(
        r"accuracy (\S+) by .*'lr': 0.3",
        output_of(tmp_path, cluster, program_forks, example, "--steps", "100", "--strategies", "all-reduce"),
    )
    assert said is not None
    assert float(said[1]) > 0.9


@pytest.mark.parametrize(
    ("example", "options"), [("ray_data_text.py", ["--strategy", "ps-asp"]), ("ray_train_text.py", [])]
)
def test_examples_of_ray_s_other_libraries(
    example: str, options: list[str], tmp_path: Path, cluster: str, program_forks: str
) -> None:
    said = output_of(tmp_path, cluster, program_forks, str(EXAMPLES / example), *options)
    (accuracy,) = re.findall(r"accuracy (\S+) on \d workers", said)
    assert float(accuracy) > 0.9
