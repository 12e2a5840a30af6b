"""A hundred clients with MNIST under Flower's own simulation, as its guides write it. For a Python that has
`flwr[simulation]` and torch; it imports nothing of Paceline.

    python flower_clients.py MODEL DATA.npz ROUNDS WORKERS BEGAN_S

MODEL is mlp or fedavg-cnn; WORKERS clients train at a time. Prints a line of JSON: seconds from BEGAN_S, of the clock
since 1970, to the first client's first batch; when each round was over; the share of test images that the trained
model knows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_CLIENTS, FRACTION, BATCH_SIZE, RATE = 100, 0.1, 10, 0.1
DATA, FIRST = "FEDERATED_DATA", "FEDERATED_FIRST"
"""Variables that Ray's processes inherit: the file of data, and the file for when the first batch came."""


def make_model(name: str) -> nn.Module:
    """The networks of McMahan et al., AISTATS 2017."""
    if name == "mlp":
        hidden = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(200, 10))
    parts: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64)):
        parts += [nn.Conv2d(before, after, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10))


@functools.cache
def data() -> dict[str, torch.Tensor]:
    """Once a process."""
    with np.load(os.environ[DATA]) as found:
        images = {
            name: torch.from_numpy(found[f"{name}_x"]).permute(0, 3, 1, 2).contiguous() for name in ("train", "test")
        }
        labels = {f"{name}_y": torch.from_numpy(found[f"{name}_y"]) for name in ("train", "test")}
    return {**images, **labels}


@functools.cache
def part_of(client: int) -> TensorDataset:
    """A hundredth of the images, drawn alike."""
    order = torch.randperm(len(data()["train"]), generator=torch.Generator().manual_seed(0))
    own = order[client::NUM_CLIENTS]
    return TensorDataset(data()["train"][own], data()["train_y"][own])


@functools.cache
def note_first() -> None:
    """Of all processes, the first batch's time; each of them looks once."""
    with contextlib.suppress(FileExistsError), open(os.environ[FIRST], "x") as file:
        file.write(str(time.time()))


def train(model: nn.Module, client: int) -> int:
    """One pass. Returns the client's number of images."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for x, y in DataLoader(part_of(client), BATCH_SIZE, shuffle=True):
        note_first()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return len(part_of(client))


def play(name: str, rounds: int, workers: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """When each round was over, and the trained model."""
    app: Any = importlib.import_module("flwr.app")
    clientapp: Any = importlib.import_module("flwr.clientapp")
    serverapp: Any = importlib.import_module("flwr.serverapp")
    strategies: Any = importlib.import_module("flwr.serverapp.strategy")
    simulation: Any = importlib.import_module("flwr.simulation")
    client_app, server_app = clientapp.ClientApp(), serverapp.ServerApp()
    over_s: list[float] = []
    trained: list[dict[str, torch.Tensor]] = []

    @client_app.train()  # type: ignore[untyped-decorator]
    def on_train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        model = make_model(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        num_images = train(model, int(context.node_config["partition-id"]))
        said = {
            "arrays": app.ArrayRecord(model.state_dict()),
            "metrics": app.MetricRecord({"num-examples": num_images}),
        }
        return app.Message(content=app.RecordDict(said), reply_to=message)

    @server_app.main()  # type: ignore[untyped-decorator]
    def on_server(grid: Any, context: Any) -> None:
        strategy = strategies.FedAvg(fraction_train=FRACTION, fraction_evaluate=0.0, min_available_nodes=NUM_CLIENTS)
        result = strategy.start(
            grid=grid,
            initial_arrays=app.ArrayRecord(make_model(name).state_dict()),
            num_rounds=rounds,
            evaluate_fn=lambda number, arrays: over_s.append(time.time()),
        )
        trained.append(result.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": workers}}
    simulation.run_simulation(server_app, client_app, num_supernodes=NUM_CLIENTS, backend_config=resources)
    return over_s, trained[0]


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        found = torch.cat([model(x).argmax(dim=1) for x in data()["test"].split(2000)])
    return float((found == data()["test_y"]).double().mean())


def main() -> None:
    name, path, rounds, workers, began_s = sys.argv[1:]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        first = Path(directory, "first")
        os.environ |= {DATA: path, FIRST: str(first)}
        over_s, state = play(name, int(rounds), int(workers))
        start_s = float(first.read_text()) - float(began_s)
    model = make_model(name)
    model.load_state_dict(state)
    print(json.dumps({"start_s": start_s, "over_s": over_s[-int(rounds) :], "accuracy": accuracy(model)}))


if __name__ == "__main__":
    # By its name, by which Ray's processes find what they are to call.
    importlib.import_module(Path(__file__).stem).main()
