"""PyTorch's elastic launcher: when a worker dies it ends the others, and starts all of them again from a checkpoint.

Run as `python -m torch.distributed.run --nproc-per-node 3 --max-restarts 2 -m benchmarks.peers.elastic_torchrun`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .deaths import SAVE_EVERY, Diary, last_step
from .workload import cycle_batches, make_model, make_optimizer, share_cores, train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--directory", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.model, args.batch_size, args.directory)
    dist.destroy_process_group()


def train(model_name: str, batch_size: int, directory: str) -> None:
    """DistributedDataParallel; the first worker saves all that a run goes on from, every so many steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share_cores(size)
    plain = make_model(model_name)
    optimizer = make_optimizer(plain)
    saved, done = Path(directory, "checkpoint.pt"), 0
    if saved.exists():
        checkpoint = torch.load(saved)
        plain.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["done"]
    model = DistributedDataParallel(plain)
    batches, diary = cycle_batches(batch_size, seed=rank), Diary(directory, rank, plain)
    for step in range(done + 1, last_step(size) + 1):
        diary.begin(step)
        train_step(model, optimizer, next(batches))
        diary.end(step)
        if rank == 0 and step % SAVE_EVERY == 0:
            under_way = saved.with_suffix(".new")
            torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "done": step}, under_way)
            os.replace(under_way, saved)


if __name__ == "__main__":
    main()
