"""Map-style data divided among clients: a pass over the loader is over one client's samples."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from paceline.errors import UsageError
from paceline.partition import LABEL
from paceline.roster import Participation, Roster
from paceline.seeding import derive
from paceline.training.sharding.division import RankBatch
from paceline.training.sharding.fetching import Fetching
from paceline.training.sharding.looks import Looks
from paceline.training.sharding.part import Part, Place

_LABELS = ("labels", "targets")
"""What data sets call them."""


@final
class ClientBatches:
    """The clients' data, in the script's batches; each pass over a client's samples has an order of its own.

    Args:
        rank, ranks: this worker's, and those of all who play.
        are_dealt_anew: turns are, where workers come and go.

    Raises:
        UsageError: the data is a stream, the script draws it in a way of its own, or it cannot be divided among the
            clients.
    """

    is_even = True

    def __init__(
        self,
        loader: DataLoader[Any],
        participation: Participation,
        *,
        rank: int,
        ranks: Sequence[int],
        seed: int,
        are_dealt_anew: bool = False,
    ) -> None:
        sampler = _plain_batch_sampler(loader)
        self._batch_size, self._drop_last = sampler.batch_size, sampler.drop_last
        self._is_shuffled = isinstance(sampler.sampler, RandomSampler)
        dataset: Any = loader.dataset
        self._samples = participation.partition.divide(
            len(dataset),
            participation.num_clients,
            column=lambda name: column_of(dataset, name),
            seed=derive(seed, "partition"),
        )
        sizes = [len(samples) for samples in self._samples]
        num_batches = [self._num_batches(count) for count in sizes]
        if not all(num_batches):
            client = num_batches.index(0)
            raise UsageError(
                f"client {client} has {sizes[client]} samples, of which no batch of {self._batch_size} is made; use "
                "fewer clients, a smaller batch size, or drop_last=False"
            )
        self.roster = Roster(participation, sizes=sizes, num_batches=num_batches, rank=rank, ranks=ranks, seed=seed)
        self._dealing = {"dealing": "elastic, of clients"} if are_dealt_anew else {}
        self._epochs, self._seed = participation.epochs, seed
        self._generator = torch.Generator()
        self.looks = Looks(loader, is_compared=False)
        self._fetching = Fetching(loader, self._generator, is_whole=True, **self.looks.changes)
        self._number = 0  # of the turn that is handed out

    def __len__(self) -> int:
        """Batches of the turn that is under way, or comes first."""
        return self._epochs * self.roster.batches_of(self._number)

    def identity(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=8)
        for samples in self._samples:
            digest.update(samples.numpy().tobytes() + b"|")
        return {
            "samples": sum(map(len, self._samples)),
            "batch size": self._batch_size,
            "drop_last": self._drop_last,
            "partition": digest.hexdigest(),
            **self._dealing,
        }

    def parts(self, place: Place) -> Iterator[Part]:
        self._number = place.epoch
        turn = self.roster.turn(place.epoch)
        seed = derive(self._seed, "turn", turn.round, turn.client)
        self._generator.manual_seed(derive(seed, "loader"))
        return self._fetching.parts(list(self._batches(turn.client, seed))[place.num_batches_done :])

    def _batches(self, client: int, seed: int) -> Iterator[RankBatch]:
        samples = self._samples[client]
        generator = torch.Generator().manual_seed(seed)
        end = self._batch_size * self._num_batches(len(samples))
        for _ in range(self._epochs):
            order = samples[torch.randperm(len(samples), generator=generator)] if self._is_shuffled else samples
            numbers = order[:end].tolist()  # at once: a tensor for each batch takes 7 us
            for first in range(0, end, self._batch_size):
                yield RankBatch(tuple(numbers[first : first + self._batch_size]), 1.0)

    def _num_batches(self, num_samples: int) -> int:
        return num_samples // self._batch_size if self._drop_last else -(-num_samples // self._batch_size)


@final
class NoBatches:
    """Stands for the data on a server whose clients are elsewhere: whatever its script has, there is no batch to train
    on."""

    is_even = True

    def __init__(self, loader: DataLoader[Any], participation: Participation) -> None:
        self._loader = loader
        self.roster = Roster(participation, sizes=(), num_batches=(), rank=0, ranks=[0], seed=0)

    def __len__(self) -> int:
        return len(self._loader)

    def identity(self) -> dict[str, Any]:
        return {}

    def parts(self, place: Place) -> Iterator[Part]:
        return iter(())


def column_of(dataset: Any, name: str) -> Sequence[Any] | Tensor:
    """The value of a column for every sample: an attribute of the data set as long as it is, or, of labels, the second
    of each sample's parts. Raises UsageError if there is none."""
    if isinstance(dataset, Subset):
        values = column_of(dataset.dataset, name)
        return [values[index] for index in dataset.indices]
    for attribute in _LABELS if name == LABEL else (name,):
        found: Any = getattr(dataset, attribute, None)
        if found is not None and len(found) == len(dataset):
            return found  # type: ignore[no-any-return]  # as it is said to be
    if name != LABEL:
        raise UsageError(f"{type(dataset).__name__} has no attribute {name!r} with a value for every sample")
    tensors: Sequence[Any] = getattr(dataset, "tensors", ())
    try:
        known: Sequence[Any] | Tensor = tensors[1] if len(tensors) > 1 else []
        return known if len(known) else [int(dataset[index][1]) for index in range(len(dataset))]
    except (TypeError, ValueError, IndexError, KeyError):
        raise UsageError(
            f"nothing tells the labels of {type(dataset).__name__}; give it an attribute `labels`, one for every sample"
        ) from None


def _plain_batch_sampler(loader: DataLoader[Any]) -> BatchSampler:
    """
    Raises:
        UsageError: what the loader draws is not each sample once, so that a client's part of it says nothing.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("an IterableDataset cannot be divided among clients; use a map-style data set")
    sampler: Any = loader.batch_sampler
    drawn = getattr(sampler, "sampler", None)
    if type(sampler) is not BatchSampler or type(drawn) not in (RandomSampler, SequentialSampler):
        raise UsageError(
            "clients' samples are drawn from their own data, so that a sampler of the DataLoader has no meaning; give "
            "it batch_size and shuffle alone"
        )
    return sampler
