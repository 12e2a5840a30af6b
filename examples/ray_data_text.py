"""Ray Data deals sentences out to the workers of a text classifier, under any strategy.

    RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32) python examples/ray_data_text.py --strategy ps-asp

Needs `pip install paceline[ray-data]`.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import ray.data
import torch
from sentences import NUM_TOPICS, NUM_WORDS, sentences
from torch import nn
from torch.nn import functional as F

import paceline
from paceline import ray_data


def train(parts: Sequence[ray.data.Dataset], *, epochs: int, lr: float) -> None:
    """One worker, with its part of the data."""
    worker = paceline.init()
    model = nn.Sequential(nn.EmbeddingBag(NUM_WORDS, 16), nn.Linear(16, NUM_TOPICS))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = ray_data.loader(parts, batch_size=16)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    texts, topics = sentences(512, seed=1).tensors
    worker.evaluation(lambda model: {"accuracy": float((model(texts).argmax(1) == topics).float().mean())})
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["text"]), batch["topic"]).backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="all-reduce")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.2)
    arguments = parser.parse_args()
    texts, topics = sentences(2048, seed=0).tensors
    rows = [{"text": text, "topic": topic} for text, topic in zip(texts.numpy(), topics.tolist(), strict=True)]
    parts = ray.data.from_items(rows).random_shuffle(seed=0).split(arguments.workers, equal=True)
    program = partial(train, parts, epochs=arguments.epochs, lr=arguments.lr)
    result = paceline.run(program, strategy=arguments.strategy, workers=arguments.workers)
    print(f"accuracy {result.metrics['accuracy']:.3f} on {arguments.workers} workers")


if __name__ == "__main__":
    main()
