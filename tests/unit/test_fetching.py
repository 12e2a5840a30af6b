"""Batches that are fetched without torch's loader are those that it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from paceline.training.sharding import RankBatch, ShardedLoader, UnpreparedLoaders
from paceline.training.sharding.fetching import Fetching

NUM_SAMPLES = 12


class Augmented(Dataset[Tensor]):
    """Draws each sample at random, as augmentation does."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(3)


class Whole(Augmented):
    """Gives the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in reversed(indices)]


class Ends(Augmented):
    """Has fewer samples than it says."""

    def __getitem__(self, index: int) -> Tensor:
        if index >= 6:
            raise StopIteration
        return super().__getitem__(index)


class Noisy(TensorDataset):
    """A table in which each sample is drawn at random."""

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(tensor + torch.rand(tensor.shape) for tensor in super().__getitem__(index))  # type: ignore[no-untyped-call]


def table(kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, 3, 4, 4, generator=generator)
    return kind(images, torch.arange(NUM_SAMPLES), images.flatten(1).double())


def channels_last() -> TensorDataset:
    return TensorDataset(torch.randn(NUM_SAMPLES, 3, 4, 4).to(memory_format=torch.channels_last))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "table": lambda: DataLoader(table(), batch_size=4),
    "table of one tensor, short last batch": lambda: DataLoader(TensorDataset(torch.randn(NUM_SAMPLES)), batch_size=5),
    "table that is not contiguous": lambda: DataLoader(channels_last(), batch_size=4),
    "table of unsigned numbers": lambda: DataLoader(
        TensorDataset(*(torch.ones(NUM_SAMPLES, 2, dtype=each) for each in (torch.uint16, torch.uint32, torch.uint64))),
        batch_size=4,
    ),
    "table of nested tensors": lambda: DataLoader(
        TensorDataset(torch.nested.nested_tensor([torch.ones(2)] * NUM_SAMPLES)), batch_size=4
    ),
    "table of a script's own kind": lambda: DataLoader(table(Noisy), batch_size=4),
    "table, collated by the script": lambda: DataLoader(table(), batch_size=4, collate_fn=len),
    "subset": lambda: DataLoader(Subset(table(), range(2, NUM_SAMPLES)), batch_size=4),
    "subset in an order of its own": lambda: DataLoader(Subset(table(), [5, -1, 0, 0, 7]), batch_size=2),
    "subset of a subset": lambda: DataLoader(Subset(Subset(table(), np.arange(9)[::-1]), (8, 0, 3)), batch_size=2),
    "subset by a tensor": lambda: DataLoader(Subset(table(), torch.tensor([4, 2, 2])), batch_size=2),  # type: ignore[arg-type]
    "subset of a script's own kind": lambda: DataLoader(Subset(table(Noisy), range(5)), batch_size=2),
    "subset by what is no number": lambda: DataLoader(Subset(TensorDataset(torch.ones(1, 2)), [True, 0]), batch_size=1),
    "data set that draws": lambda: DataLoader(Augmented(), batch_size=4),
    "data set that ends early": lambda: DataLoader(Ends(), batch_size=4),
    "data set of whole batches": lambda: DataLoader(Whole(), batch_size=4),
    "unbatched": lambda: DataLoader(table(), batch_size=None),
    "fetched by a batch sampler": lambda: DataLoader(
        Subset(table(), range(NUM_SAMPLES)),
        batch_size=None,
        sampler=BatchSampler(range(NUM_SAMPLES), 4, drop_last=False),
        collate_fn=list,
    ),
}


def looks(thing: Any) -> Any:
    """What tells it from another: containers, kinds of tensors and how they lie in memory, values."""
    if isinstance(thing, Tensor):
        return thing.dtype, thing.shape, thing.stride(), thing.tolist()
    return (type(thing), [looks(part) for part in thing]) if isinstance(thing, list | tuple) else thing


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_torch(name: str) -> None:
    loader = LOADERS[name]()
    loader.generator = torch.Generator()  # from which torch draws a seed for loader workers
    indices: list[Any] = list(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    is_whole = isinstance(indices[0], list)
    batches = [RankBatch(tuple(each) if is_whole else (each,), 1.0) for each in indices]
    fetching = Fetching(loader, torch.Generator(), is_whole=is_whole)
    torch.manual_seed(1)
    expected = [looks(data) for data in loader]
    torch.manual_seed(1)
    assert [(looks(part.data), part.num_samples) for part in fetching.parts(batches)] == [
        (data, len(batch.samples)) for data, batch in zip(expected, batches, strict=name != "data set that ends early")
    ]


def test_a_profile_shows_what_loading_takes() -> None:
    fetching = Fetching(LOADERS["table"](), torch.Generator(), is_whole=True)
    with torch.profiler.profile() as profile:
        assert len(list(fetching.parts([RankBatch((0, 1), 1.0)]))) == 1
    assert any("DataLoader" in event.key for event in profile.key_averages())


def test_a_table_may_get_other_tensors() -> None:
    data = table()
    parts = Fetching(DataLoader(data, batch_size=2), torch.Generator(), is_whole=True).parts(
        [RankBatch((0, 1), 1.0), RankBatch((-1, 3), 1.0)]
    )
    next(parts)
    data.tensors = (torch.arange(NUM_SAMPLES),)
    assert [tensor.tolist() for tensor in next(parts).data] == [[NUM_SAMPLES - 1, 3]]


PLAIN: dict[str, Callable[[], Dataset[Any]]] = {"table": table, "subset": lambda: Subset(table(), range(NUM_SAMPLES))}


def fetched(data: Dataset[Any], *indices: Any) -> Any:
    [part] = Fetching(DataLoader(data, batch_size=2), torch.Generator(), is_whole=True).parts([RankBatch(indices, 1.0)])
    return part.data


@pytest.mark.parametrize("name", PLAIN)
def test_a_row_that_is_not_there_is_told_as_torch_tells_it(name: str) -> None:
    data = PLAIN[name]()
    with pytest.raises(IndexError) as expected:
        next(iter(DataLoader(data, batch_size=2, sampler=[0, NUM_SAMPLES])))
    with pytest.raises(IndexError) as found:
        fetched(data, 0, NUM_SAMPLES)
    assert str(found.value) == str(expected.value)


def test_what_is_no_number_selects_as_under_torch() -> None:
    data = TensorDataset(torch.arange(2.0))
    expected = next(iter(DataLoader(data, batch_size=2, sampler=[True, True])))
    assert looks(fetched(data, True, True)) == looks(expected)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        fetched(data, 1, True)


def test_what_is_fetched_in_place_of_torch_makes_no_tensor_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> NoReturn:
        raise AssertionError("a row by itself")

    monkeypatch.setattr(TensorDataset, "__getitem__", refused)
    assert fetched(Subset(table(), [3, 1, 2]), 0, 2)[1].tolist() == [3, 2]


def test_a_collation_that_the_script_has_changed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(batch: Any, **_: Any) -> Tensor:
        return torch.stack(list(batch)).sum(0)

    monkeypatch.setitem(default_collate_fn_map, Tensor, summed)
    assert fetched(TensorDataset(torch.arange(5)), 1, 3)[0].item() == 4


class ReadsAnother(Augmented):
    """Each sample is a batch of another loader."""

    def __getitem__(self, index: int) -> Tensor:
        batch: Tensor = next(iter(DataLoader(torch.arange(NUM_SAMPLES), batch_size=2)))  # type: ignore[arg-type]
        return batch


def test_a_loader_that_a_data_set_reads_is_not_the_scripts() -> None:
    watch = UnpreparedLoaders(rank=0, size=2)
    try:
        batches = iter(ShardedLoader(DataLoader(ReadsAnother(), batch_size=2), rank=0, size=2, seed=0))
        assert next(batches).shape == (2, 2)
        assert not watch.passes
        own = iter(DataLoader(torch.arange(NUM_SAMPLES)))  # type: ignore[arg-type]
        assert [one.batches() for one in watch.passes] == [own]
    finally:
        watch.close()
