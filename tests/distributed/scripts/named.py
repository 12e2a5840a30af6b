"""A script in TensorFlow's words, under the strategy that it is told by its name. It trains until its run ends."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.compat import strategies

GLOBAL_BATCH = 8
STRATEGIES = {
    "MirroredStrategy": lambda: strategies.MirroredStrategy(["CPU:0", "CPU:1"]),
    "MultiWorkerMirroredStrategy": lambda: strategies.MultiWorkerMirroredStrategy(workers=2),
    "CentralStorageStrategy": lambda: strategies.CentralStorageStrategy(workers=2),
    "ParameterServerStrategy": lambda: strategies.ParameterServerStrategy(workers=2, servers=2),
    "OneDeviceStrategy": lambda: strategies.OneDeviceStrategy("CPU:0"),
}


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_optimizer(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)


def make_data():
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def train(strategy, step_s):
    with strategy.scope() as worker:
        model = make_model()
        loader = DataLoader(make_data(), batch_size=strategy.per_replica_batch(GLOBAL_BATCH), shuffle=True)
        model, optimizer, loader = worker.prepare(model, make_optimizer(model), loader)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(step_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=STRATEGIES)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    strategy = STRATEGIES[args.name]()
    strategy.run(train, (strategy, 0.02), out=args.out)
