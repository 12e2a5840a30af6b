"""Ray Train's failure policy: when a worker dies it starts a new group of them, which goes on from the last checkpoint
that was reported.

Run as `python -m benchmarks.peers.elastic_ray_train --workers 3 --directory DIRECTORY`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from .deaths import SAVE_EVERY, Diary, last_step
from .workload import cycle_batches, make_model, make_optimizer, share_cores, train_step


def train(config: dict[str, Any]) -> None:
    """One of Ray Train's workers."""
    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    share_cores(size)
    plain = make_model(config["model"])
    optimizer, done = make_optimizer(plain), 0
    found = ray.train.get_checkpoint()
    if found is not None:
        with found.as_directory() as directory:
            checkpoint = torch.load(Path(directory, "checkpoint.pt"))
        plain.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["done"]
    model = prepare_model(plain)
    batches, diary = cycle_batches(config["batch_size"], seed=rank), Diary(config["directory"], rank, plain)
    for step in range(done + 1, last_step(size) + 1):
        diary.begin(step)
        train_step(model, optimizer, next(batches))
        diary.end(step)
        if step % SAVE_EVERY == 0:
            _report(rank, {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "done": step})


def _report(rank: int, content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        saved = None
        if rank == 0:
            torch.save(content, Path(directory, "checkpoint.pt"))
            saved = Checkpoint.from_directory(directory)
        ray.train.report({"done": content["done"]}, checkpoint=saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--directory", required=True)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=args.workers + 1, include_dashboard=False, log_to_driver=False)
    failures = FailureConfig(max_failures=args.workers - 1)
    TorchTrainer(
        train,
        train_loop_config={name: getattr(args, name) for name in ("model", "batch_size", "directory")},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(name="run", storage_path=f"{args.directory}/ray", failure_config=failures),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
