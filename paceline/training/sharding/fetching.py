"""Fetches batches of map-style data by their indices."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, MapDataPipe, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from paceline.training.sharding.division import RankBatch
from paceline.training.sharding.part import Part
from paceline.training.sharding.rebuilding import rebuilt

Fetch = Callable[[Any], Any]
_UNSELECTABLE = {torch.uint16, torch.uint32, torch.uint64}
"""Whose rows torch stacks, but does not select."""
_NUMBERS = {int, np.int64}
"""Types of indices that are numbers of rows; `bool` is none."""


@final
class Fetching:
    """Fetches with the script's loader workers, if it has any. Otherwise as torch's loader does in the script's own
    process, without the fifteen calls that it makes around each batch.

    Args:
        loader: the script's.
        generator: seeds the loader workers.
        is_whole: whether what is fetched at once is a list of indices, or one of them.
        changes: to the script's loader.
    """

    def __init__(self, loader: DataLoader[Any], generator: torch.Generator, *, is_whole: bool, **changes: Any) -> None:
        self._is_whole = is_whole
        self._batches: Iterable[RankBatch] = ()
        self._given: deque[RankBatch] = deque()
        feeds = {"batch_size": None, "sampler": self} if loader.batch_sampler is None else {"batch_sampler": self}
        self._inner = rebuilt(loader, loader.dataset, generator, **feeds, **changes)

    def parts(self, batches: Iterable[RankBatch]) -> Iterator[Part]:
        """The samples of these batches."""
        fetch = _here(self._inner)
        if fetch is not None:
            is_whole = self._is_whole
            for batch in batches:
                try:
                    data = fetch(list(batch.samples) if is_whole else batch.samples[0])
                except StopIteration:  # of the data set, by which torch's loader ends as well
                    return
                # What `Part` does, without its call in Python.
                yield tuple.__new__(Part, (data, len(batch.samples), batch.weight, None, None))
            return
        given: deque[RankBatch] = deque()
        self._batches, self._given = batches, given
        for data in self._inner:
            batch = given.popleft()
            yield Part(data, len(batch.samples), batch.weight)

    def __iter__(self) -> Iterator[Any]:
        """As the inner loader's sampler: remembers what it has given and the loader has not yet fetched."""
        batches, given = self._batches, self._given
        for batch in batches:
            given.append(batch)
            yield list(batch.samples) if self._is_whole else batch.samples[0]


def _here(loader: DataLoader[Any]) -> Fetch | None:
    """What fetches in this process; none where torch's loader does more than that."""
    dataset: Any = loader.dataset
    is_profiled = torch.autograd._profiler_enabled()  # which shows what loading takes
    if loader.num_workers or loader.pin_memory or is_profiled or isinstance(dataset, MapDataPipe):
        return None
    fetch: Fetch = _MapDatasetFetcher(dataset, loader._auto_collation, loader.collate_fn, loader.drop_last).fetch
    if loader.collate_fn is default_collate and loader._auto_collation and _stacks_rows() and _is_table(dataset):
        return partial(_rows, dataset, fetch)
    return fetch


def _stacks_rows() -> bool:
    """Whether the script has left torch's functions of collation as they were."""
    known = default_collate_fn_map
    return known.get(Tensor) is collate_tensor_fn and not any(issubclass(tuple, kind) for kind in known)


def _is_table(dataset: Any) -> bool:
    """Whether it is a plain `TensorDataset`, or a subset of one."""
    while type(dataset) is Subset and isinstance(dataset.indices, list | tuple | range | np.ndarray):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(map(_has_plain_rows, dataset.tensors))


def _has_plain_rows(tensor: Tensor) -> bool:
    """Whether a selection of its rows is what stacking them makes."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.is_nested or tensor.dtype in _UNSELECTABLE:
        return False
    return tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_quantized


def _rows(dataset: Any, fetch: Fetch, indices: Sequence[Any]) -> Any:
    """A batch of a table, or of a subset of one, of which torch would make a tensor for each sample first."""
    table, rows = dataset, indices
    while type(table) is Subset:
        within = table.indices
        table, rows = table.dataset, [within[row] for row in rows]
    if not _NUMBERS.issuperset(map(type, rows)) or min(rows) < 0:
        return fetch(indices)
    try:
        selected = torch.frombuffer(array("q", rows), dtype=torch.int64)
        found = []
        for tensor in table.tensors:  # a list's own loop is a call
            found.append(tensor.index_select(0, selected))
        return found
    except (IndexError, RuntimeError, OverflowError):  # there is no such row: torch's loader says which
        return fetch(indices)
