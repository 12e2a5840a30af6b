"""The same step by Paceline's own all-reduce: rank 0 reduces and broadcasts, and workers keep rows and parameters."""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import torch
from accounting import middle_half
from problem import Array, Problem, split
from torch.utils.data import DataLoader, Sampler

import paceline
from paceline.records import StepRecord

NUM_WARM_UPS = 3
"""Steps that the times leave out: the first meets the others and loads what it needs."""


def descend(
    problem: Problem, *, num_workers: int, rate: float, num_steps: int, out: Path
) -> tuple[Array, dict[str, float]]:
    """Gradient descent by `all-reduce`, algorithm `reduce-broadcast`, in processes that are started for it.

    Args:
        num_steps: more than `NUM_WARM_UPS`, which the times leave out.
        out: a new directory for the run's files.

    Returns:
        The parameters, and the mean worker's seconds a step: `compute_s`, `communication_s` and `waiting_s`.
    """
    strategy = paceline.AllReduce(algorithm="reduce-broadcast")
    train = _program(problem, rate=rate, num_steps=num_steps)
    result = paceline.run(train, strategy=strategy, workers=num_workers, device="cpu", out=out)
    [w] = result.model_state().values()
    return w.numpy()[0], step_parts([step for step in result.steps if step.step > NUM_WARM_UPS])


def step_parts(steps: list[StepRecord]) -> dict[str, float]:
    """The mean over workers and the middle half of the steps; the three add up to the mean step."""
    parts = ("compute_s", "communication_s", "waiting_s")
    kept = middle_half(steps, lambda step: sum(getattr(step, part) for part in parts))
    return {part: sum(getattr(step, part) for step in kept) / len(kept) for part in parts}


def _program(problem: Problem, *, rate: float, num_steps: int) -> Callable[[], None]:
    """What each worker runs. The rows travel in it, once."""

    def train() -> None:
        worker = paceline.init()
        splits = [tuple(map(torch.tensor, rows)) for rows in split(problem, worker.size)]
        model = torch.nn.Linear(problem.x.shape[1], 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        # One split a worker and step, again and again in one epoch.
        loader = DataLoader(splits, sampler=Rounds(worker.size), collate_fn=lambda batch: batch[0])
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        for x, y in islice(loader, num_steps):
            loss = (model(x)[:, 0] - y).square().sum() / 2
            optimizer.zero_grad()
            # Workers average gradients, and splits may differ by a row: times the workers, divided by all rows.
            (loss * (worker.size / problem.num_rows)).backward()
            optimizer.step()

    return train


class Rounds(Sampler[int]):
    """0, 1, ... to one less than the number, without an end."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[int]:
        return cycle(range(self._number))
