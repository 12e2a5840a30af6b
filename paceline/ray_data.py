"""Ray Data: parts of a data set, one a worker, as a loader. Nothing else in Paceline imports this."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from threading import Thread
from typing import Any, final

import ray
from ray.data import DataIterator, Dataset
from torch.utils.data import DataLoader, IterableDataset

from paceline.engines.world import current
from paceline.errors import UsageError

NOTICE_S = 15.0
"""How long a worker waits for its first batch until it says so, and from then on until it says so again."""
GIVE_UP_S = 120.0
"""How long it waits for tasks of Ray Data's that this run leaves no core for."""


def loader(parts: Sequence[Dataset | DataIterator], **batches: Any) -> DataLoader[Any]:
    """A loader for `worker.prepare`, with this worker's part of data that Ray has split.

    Args:
        parts: one a worker: `dataset.streaming_split(n, equal=True)`, `dataset.split(n)` or the like; `[dataset]` of
            one worker.
        batches: as of `iter_torch_batches`: `batch_size`, `collate_fn`, `local_shuffle_buffer_size` and so on.

    Each pass over the loader is one over the part, in batches as `iter_torch_batches` gives them.

    A worker that has to wait for the first batch of a pass says so now and then.

    Raises:
        UsageError: there are not as many parts as workers; `paceline.init()` was not called; or parts begin their
            passes together, as those of `streaming_split` do, and workers do not; later: no batch has come for two
            minutes, and the run itself leaves Ray Data no core.
    """
    world = current()
    rank, size = (0, 1) if world is None else (world.context.rank, world.context.size)
    if world is None and len(parts) > 1:
        raise UsageError("call paceline.init() before ray_data.loader(), which then knows whose part is whose")
    if len(parts) != size:
        raise UsageError(f"{len(parts)} parts of Ray's data are given to {size} workers: split it into {size}")
    part = parts[rank]
    if world is not None and size > 1 and not isinstance(part, Dataset):
        together = "parts of streaming_split begin every pass over the data together, which workers"
        if world.context.pacing.is_simulated:
            raise UsageError(f"{together} of --engine virtual, in one process, cannot; use dataset.split({size})")
        if not world.strategy.traits.lock_step:
            raise UsageError(f"{together} that are not in step do not; use dataset.split({size})")
    return DataLoader(_Part(part, batches), batch_size=None)


@final
class _Part(IterableDataset[Any]):
    """This worker's alone, batch by batch."""

    splits_by_rank = True

    def __init__(self, part: Dataset | DataIterator, batches: dict[str, Any]) -> None:
        self._part, self._batches = part, batches

    def __iter__(self) -> Iterator[Any]:
        return _first_awaited(lambda: iter(self._part.iter_torch_batches(**self._batches)))


_END = object()


def _first_awaited(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """What `begin` gives. The first batch, for which tasks of Ray Data's need cores, is awaited in words."""
    coming: Future[tuple[Iterator[Any], Any]] = Future()

    def fetch() -> None:
        try:
            batches = begin()
            coming.set_result((batches, next(batches, _END)))
        except BaseException as error:
            coming.set_exception(error)

    # A daemon, since nothing ends Ray Data's own wait.
    Thread(target=copy_context().run, args=(fetch,), name="paceline-ray-data", daemon=True).start()
    began_s = time.monotonic()
    while not wait([coming], timeout=NOTICE_S).done:
        _tell_what_is_awaited(time.monotonic() - began_s)
    batches, first = coming.result()
    if first is not _END:
        yield first
        yield from batches


def _tell_what_is_awaited(waited_s: float) -> None:
    """Raises UsageError where there is no hope."""
    total, free = (resources.get("CPU", 0.0) for resources in (ray.cluster_resources(), ray.available_resources()))
    held = _cores_of_this_run()
    cores = f"{free:g} of the cluster's {total:g} are free, and this run's processes hold {held:g}"
    if total - held < 1 and waited_s >= GIVE_UP_S:
        raise UsageError(
            f"no batch has come from Ray Data for {waited_s:.0f} s: its tasks need cores, of which {cores}; start Ray "
            "with more cores or the run with fewer workers, or load the data before the run: dataset.split(n)"
        )
    print(
        f"has waited {waited_s:.0f} s for its first batch from Ray Data, whose tasks need cores: {cores}",
        file=sys.stderr,
        flush=True,
    )


def _cores_of_this_run() -> float:
    """What its workers and servers hold of Ray's cores, each as much as this one. A program of its own holds none."""
    world, here = current(), ray.get_runtime_context()
    if world is None or here.get_actor_id() is None:
        return 0.0
    own = here.get_assigned_resources().get("CPU", 0.0)
    return float(own) * (world.context.size + world.strategy.traits.num_servers)
