"""Ray Data: parts of a data set, one a worker, as a loader. Nothing else in Paceline imports this."""

from collections.abc import Iterator, Sequence
from typing import Any, final

from ray.data import DataIterator, Dataset
from torch.utils.data import DataLoader, IterableDataset

from paceline.engines.world import current
from paceline.errors import UsageError


def loader(parts: Sequence[Dataset | DataIterator], **batches: Any) -> DataLoader[Any]:
    """A loader for `worker.prepare`, with this worker's part of data that Ray has split.

    Args:
        parts: one a worker: `dataset.streaming_split(n, equal=True)`, `dataset.split(n)` or the like; `[dataset]` of
            one worker.
        batches: as of `iter_torch_batches`: `batch_size`, `collate_fn`, `local_shuffle_buffer_size` and so on.

    Each pass over the loader is one over the part, in batches as `iter_torch_batches` gives them.

    Raises:
        UsageError: there are not as many parts as workers; `paceline.init` was not called before; or parts begin their
            passes together, as those of `streaming_split` do, and workers do not.
    """
    world = current()
    if world is None and len(parts) > 1:
        raise UsageError("call paceline.init() before ray_data.loader: it says which of the parts is this worker's")
    rank, size = (0, 1) if world is None else (world.context.rank, world.context.size)
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
        return iter(self._part.iter_torch_batches(**self._batches))
