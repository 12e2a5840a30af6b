"""A simulated run from start to end; where a failure ends it, it begins anew from its newest checkpoint."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint import DamagedCheckpoint
from paceline.engines.standing import Watcher
from paceline.engines.virtual.engine import VirtualRun
from paceline.engines.virtual.job import VirtualJob
from paceline.errors import RunFailed, UsageError
from paceline.running import resuming

_MOST_TRIES = 50
"""Tries from one checkpoint, at most: hosts that fail so often let nobody come to the next."""


def simulate(
    job: VirtualJob, directory: Path, watcher: Watcher, *, begin: Callable[[], None], began_s: float = 0.0
) -> None:
    """As `VirtualRun.run`. With `checkpoint_every` a run without `--elastic` begins anew where a failure has ended it,
    as somebody would with `--resume` once a host is there: the clock shows that time, and what was done twice.

    Args:
        begin: called when nothing that was asked for keeps the run from beginning.
        began_s: what the clock shows then, as the job's checkpoint has it.
    """
    simulation = VirtualRun(job, directory, watcher)
    begin()
    num_tries: dict[int, int] = {}
    while True:
        try:
            simulation.run()
            return
        except RunFailed:
            lost = simulation.lost
            found = _newest(directory) if job.config.checkpoint_every is not None else None
            if lost is None or found is None or math.isinf(lost.down_s):
                raise
        iteration = found.checkpoint.iteration
        num_tries[iteration] = num_tries.get(iteration, 0) + 1
        if num_tries[iteration] > _MOST_TRIES:
            raise RunFailed(
                f"hosts have failed {_MOST_TRIES} times before the run came from the checkpoint of iteration "
                f"{iteration} to the next; save more often (--checkpoint-every), or give fewer failures"
            )
        ended_s = began_s + lost.at_s
        again_s = ended_s - max(found.checkpoint.time_s, began_s)
        began_s = ended_s + lost.down_s
        resuming.drop_later(found)
        checkpoint = replace(found.checkpoint, time_s=began_s)
        simulation = VirtualRun(
            replace(job, checkpoint=checkpoint.encode()),
            directory,
            watcher,
            ledger=simulation.ledger,
            attempt=simulation.attempt + 1,
        )
        simulation.begins_anew(host=lost.host, iteration=iteration, again_s=again_s, down_s=lost.down_s)


def _newest(directory: Path) -> resuming.Found | None:
    try:
        return resuming.find(directory)
    except (UsageError, DamagedCheckpoint):
        return None
