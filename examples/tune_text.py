"""Ray Tune looks for the strategy and the learning rate that suit a text classifier, and stops poor trials early.

    RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32) python examples/tune_text.py

Needs `pip install paceline[ray-data]`.
"""

import argparse
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sentences import NUM_TOPICS, NUM_WORDS, sentences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.tune import trainable


def train(config: dict[str, Any]) -> None:
    """One trial, with what Tune chose."""
    worker = paceline.init()
    model = nn.Sequential(nn.EmbeddingBag(NUM_WORDS, 16), nn.Linear(16, NUM_TOPICS))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    training = DataLoader(sentences(2048, seed=0), batch_size=16, shuffle=True)
    model, optimizer, training = worker.prepare(model, optimizer, training)
    texts, topics = sentences(512, seed=1).tensors
    worker.evaluation(lambda model: {"accuracy": float((model(texts).argmax(1) == topics).float().mean())})
    while not worker.is_over:
        for text, topic in training:
            optimizer.zero_grad()
            F.cross_entropy(model(text), topic).backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="iterations of a trial that nobody stops")
    parser.add_argument("--strategies", nargs="+", default=["all-reduce", "ps-bsp"], help="to choose from")
    arguments = parser.parse_args()
    scheduler = ASHAScheduler(metric="accuracy", mode="max", grace_period=2, reduction_factor=2)
    results = tune.Tuner(
        trainable(train, workers=2, cpus=0.5, eval_every=20, max_steps=arguments.steps),
        param_space={
            "strategy": tune.grid_search(arguments.strategies),
            "lr": tune.grid_search([0.3, 0.001]),
        },
        tune_config=tune.TuneConfig(scheduler=scheduler),
    ).fit()
    best = results.get_best_result("accuracy", "max")
    print(f"accuracy {best.metrics['accuracy']:.3f} by {best.config}")


if __name__ == "__main__":
    main()
