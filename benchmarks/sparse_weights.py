"""Trains as recipes/mnist.py does, but a client sends the largest 5 % of its weights, and nothing of the others.

At the end of its turn, of STEPS steps, it sets all others to 0: what it has changed is then what a server would make of
such a message. For clients.py, which shows what not to send.
"""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS, PART = 5, 0.05
RECIPE = Path(__file__).parents[1] / "recipes" / "mnist.py"
taken: Counter[int] = Counter()


def keep_largest(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    taken[id(optimizer)] += 1
    if taken[id(optimizer)] % STEPS:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    with torch.no_grad():
        sizes = torch.cat([each.abs().flatten() for each in parameters])
        least = sizes.topk(max(1, round(PART * len(sizes)))).values[-1]
        for each in parameters:
            each.mul_(each.abs() >= least)


if __name__ == "__main__":
    hook = register_optimizer_step_post_hook(keep_largest)
    try:
        runpy.run_path(str(RECIPE), run_name="__main__")
    finally:
        hook.remove()  # the next run may be in this process
