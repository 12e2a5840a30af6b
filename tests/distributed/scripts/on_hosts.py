"""Ray's own libraries, and TensorFlow's names, on the hosts of the cluster at ADDRESS: a program that takes ADDRESS and
DIRECTORY, where each worker writes from which host it is."""

import json
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.compat.strategies import MultiWorkerMirroredStrategy
from paceline.engines.ray.nodes import own_address

ROWS, EPOCHS, LR = 32, 3, 0.1
PARTS: dict[str, Callable[[str, Path], None]] = {}


def part(function: Callable[[str, Path], None]) -> Callable[[str, Path], None]:
    PARTS[function.__name__] = function
    return function


def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def descend(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[], Any]) -> None:
    for _ in range(EPOCHS):
        for x, y in batches():
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()


def made() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def tell(to: Path, rank: int, model: torch.nn.Module) -> None:
    weight = next(model.parameters()).flatten().tolist()
    to.with_name(f"{to.name}-{rank}.json").write_text(json.dumps({"host": own_address(), "weight": weight}))


def train_alone(to: Path) -> None:
    model, optimizer = made()
    x, y = map(torch.from_numpy, rows())
    descend(model, optimizer, lambda: [(x, y)])
    tell(to, 0, model)


def train_under_a_name(strategy: MultiWorkerMirroredStrategy, to: Path) -> None:
    with strategy.scope() as worker:
        model, optimizer = made()
        data = TensorDataset(*map(torch.from_numpy, rows()))
        loader = DataLoader(data, batch_size=strategy.per_replica_batch(ROWS))
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
    descend(model, optimizer, lambda: loader)
    tell(to, worker.rank, model)


@part
def names(address: str, directory: Path) -> None:
    strategy = MultiWorkerMirroredStrategy(workers=2)
    strategy.run(train_under_a_name, args=(strategy, directory / "names"), address=address, out=directory / "mirrored")


def train_on_parts(parts: Any, to: Path) -> None:
    from paceline import ray_data

    worker = paceline.init()
    model, optimizer = made()
    loader = ray_data.loader(parts, batch_size=ROWS // 2)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    descend(model, optimizer, lambda: ((batch["x"], batch["y"]) for batch in loader))
    tell(to, worker.rank, model)


@part
def data(address: str, directory: Path) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items([{"x": x, "y": y} for x, y in zip(*rows(), strict=True)], override_num_blocks=4)
    parts = dataset.streaming_split(2, equal=True)
    program = partial(train_on_parts, parts, directory / "data")
    paceline.run(program, workers=2, address=address, out=directory / "parts")


def train_in_trial(to: Path, config: dict[str, Any]) -> None:
    worker = paceline.init()
    model, optimizer = made()
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, rows())), batch_size=ROWS // 2)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    worker.evaluation(lambda model: {"loss": float(model.weight.square().sum())})
    descend(model, optimizer, lambda: loader)
    tell(to, worker.rank, model)


@part
def tune(address: str, directory: Path) -> None:
    from ray.tune import RunConfig, Tuner

    from paceline.tune import trainable

    trial = trainable(partial(train_in_trial, directory / "tune"), eval_every=1, workers=2)
    Tuner(trial, param_space={}, run_config=RunConfig(storage_path=str(directory / "trials"), verbose=0)).fit()


def train_in_ray_train(config: dict[str, Any]) -> None:
    import torch.distributed as dist
    from ray.train.torch import prepare_data_loader, prepare_model

    model = prepare_model(made()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = prepare_data_loader(DataLoader(TensorDataset(*map(torch.from_numpy, rows())), batch_size=ROWS // 2))
    descend(model, optimizer, lambda: loader)
    assert dist.get_backend() == "paceline"
    tell(Path(config["to"]), dist.get_rank(), model)


@part
def train(address: str, directory: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train_in_ray_train,
        train_loop_config={"to": str(directory / "train")},
        torch_config=TorchConfig(backend="paceline"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(directory / "trained")),
    ).fit()


if __name__ == "__main__":
    address, directory = sys.argv[1], Path(sys.argv[2])
    train_alone(directory / "alone")
    ray.init(address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}})
    for name in sys.argv[3:] or PARTS:
        PARTS[name](address, directory)
        print(name, "on", socket.gethostname(), flush=True)
