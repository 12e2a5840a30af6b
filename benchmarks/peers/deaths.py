"""What workers of a run that loses some of them write down, and what follows from it: how long a death costs, and how
many steps."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, final

from torch import nn

STEPS_APART = 40
SAVE_EVERY = 10
"""Steps between the checkpoints of those systems that go on from one."""
NUM_WARM = 10


class Committed(NamedTuple):
    when_s: float
    """Since the epoch."""
    step: int
    begun_s: float = 0.0
    """When its batch was there, before the forward pass."""


class Recovery(NamedTuple):
    next_s: float
    """From SIGKILL to the end of the next step, whichever that is."""
    caught_up_s: float
    """To the end of the next step that had not been done before."""
    lost_steps: int
    """That had been done, and were done again."""


def last_step(num_workers: int) -> int:
    return STEPS_APART * (num_workers + 1)


@final
class Diary:
    """One worker's. Each but rank 0 dies in the backward pass of a step of its own, halfway between two checkpoints;
    where it is started again it lives."""

    def __init__(self, directory: str, rank: int, model: nn.Module, *, dies: bool = True) -> None:
        self._struck = Path(directory, f"struck-{rank}")
        self._dies_in = STEPS_APART * rank + SAVE_EVERY // 2
        self._first = next(model.parameters()) if dies and rank and not self._struck.exists() else None
        self._begun_s = 0.0
        self._file = open(f"{directory}/steps-{rank}", "a", buffering=1)  # noqa: SIM115 - as long as the process

    def begin(self, step: int) -> None:
        self._begun_s = time.time()
        if self._first is not None and step == self._dies_in:
            self._first.register_hook(partial(_die, self._struck, step))

    def end(self, step: int) -> None:
        print(time.time(), step, self._begun_s, file=self._file)


def _die(path: Path, step: int, _: object) -> None:
    path.write_text(f"{time.time()} {step}")
    os.kill(os.getpid(), signal.SIGKILL)


def committed(directory: Path, *, rank: int = 0) -> list[Committed]:
    """In the order in which the rank did them, also where it was started again."""
    return [_read(line) for line in Path(directory, f"steps-{rank}").read_text().splitlines()]


def recoveries(directory: Path) -> list[Recovery]:
    """One for each death of a run."""
    steps = committed(directory)
    return [_recovery(steps, _read(path.read_text())) for path in sorted(directory.glob("struck-*"))]


def _recovery(steps: list[Committed], death: Committed) -> Recovery:
    """What rank 0 did after that: whoever has its process restarted does a step that it had done before."""
    repeats = [later.step <= earlier.step for earlier, later in pairwise([Committed(0.0, 0), *steps])]
    after = [
        each
        for each, is_repeated in zip(steps, repeats, strict=True)
        if each.when_s > death.when_s and (is_repeated or each.step >= death.step)
    ]
    new = next(each for each in after if each.step >= death.step)
    return Recovery(after[0].when_s - death.when_s, new.when_s - death.when_s, death.step - after[0].step)


def _read(line: str) -> Committed:
    when_s, step, *begun_s = line.split()
    return Committed(float(when_s), int(step), *map(float, begun_s))


def step_s(directory: Path) -> float:
    """Of rank 0 in the median before the first death, without the first steps."""
    struck_s = min((_read(path.read_text()).when_s for path in directory.glob("struck-*")), default=float("inf"))
    calm = [each.when_s for each in committed(directory) if each.when_s < struck_s][NUM_WARM:]
    return median(after_s - before_s for before_s, after_s in pairwise(calm))
