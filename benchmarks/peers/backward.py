"""How long steps of plain PyTorch take, and their backward passes: `python -m peers.backward` prints them as JSON."""

from __future__ import annotations

import argparse
import json
import time

import torch.nn.functional as F

from paceline.memory import keep_freed_memory

from .workload import cycle_batches, make_model, make_optimizer, share_cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True, help="that share the cores")
    args = parser.parse_args()
    keep_freed_memory()  # as Paceline's workers do
    share_cores(args.processes)
    model = make_model(args.model)
    optimizer = make_optimizer(model)
    batches = cycle_batches(args.batch_size, seed=0)
    steps = []
    for _ in range(args.steps):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        forward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter() - forward_s
        optimizer.step()
        steps.append({"step_s": time.perf_counter() - began_s, "backward_s": backward_s})
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
