"""How a worker that joins comes to take part: its script goes on to where the others are, and takes what one gives."""

from collections.abc import Callable
from pathlib import Path

from paceline.elastic import Member, StaleEpoch
from paceline.training.sharding import Place
from paceline.training.worker_run import WorkerRun


def take(run: WorkerRun, enter: Callable[[Path, int], Member | int]) -> Member | None:
    """This worker's script asks for a pass over its data. Returns what it is when it takes part; None where the others
    are in a later epoch, and passes are empty until there.

    Args:
        enter: makes of another's state, and the epoch that this worker's script has come to, what it is; or says which
            later epoch that state is of. Raises StaleEpoch where the others have gone on without this worker since.

    Raises:
        BudgetReached: the run has ended.
    """
    reform, feed = run.context.reform, run.prepared.feed
    assert reform is not None
    while True:
        epoch = feed.loader.place.epoch
        found = reform.take(rank=run.context.rank, epoch=epoch)
        try:
            entered = found if isinstance(found, int) else enter(found, epoch)
        except StaleEpoch:
            continue
        if isinstance(entered, Member):
            return entered
        feed.loader.resume_at(Place(entered, 0), {})
        return None
