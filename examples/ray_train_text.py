"""Ray Train trains a text classifier by DistributedDataParallel, over Paceline's backend.

    python examples/ray_train_text.py

Needs `pip install paceline[ray-data]`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from sentences import NUM_TOPICS, NUM_WORDS, sentences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


def train(config: dict[str, Any]) -> None:
    """One of Ray Train's workers."""
    model = prepare_model(nn.Sequential(nn.EmbeddingBag(NUM_WORDS, 16), nn.Linear(16, NUM_TOPICS)))
    loader = prepare_data_loader(DataLoader(sentences(2048, seed=0), batch_size=16, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    for _ in range(config["epochs"]):
        for text, topic in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(text), topic).backward()
            optimizer.step()
    texts, topics = sentences(512, seed=1).tensors
    found = {"accuracy": float((model(texts).argmax(1) == topics).float().mean())}
    with tempfile.TemporaryDirectory() as directory:
        saved = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(model.state_dict(), Path(directory) / "model.pt")
            saved = Checkpoint.from_directory(directory)
        ray.train.report(found, checkpoint=saved)  # the result has metrics of what was saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--out", type=Path, default=Path("ray-train-text"), help="where Ray Train has its files")
    arguments = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs, "lr": arguments.lr},
        torch_config=TorchConfig(backend="paceline"),  # the only word that is not Ray's
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(storage_path=str(arguments.out.resolve())),
    ).fit()
    print(f"accuracy {result.metrics['accuracy']:.3f} on {arguments.workers} workers")


if __name__ == "__main__":
    main()
