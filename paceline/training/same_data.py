"""Notices map-style data that are not the same on all ranks, or drawn in another order, and dealt out by indices."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from torch.utils.data import IterableDataset

from paceline.errors import UsageError
from paceline.training.sharding import DIFFERS, ShardedLoader
from paceline.training.sharding.fingerprint import Fingerprint, first_unlike, places


class Told(NamedTuple):
    """What a rank says of a loader."""

    epoch: int
    samples: Fingerprint
    """Marks of a few."""
    order_epoch: int
    order: str
    """A digest of what the script's sampler has drawn; empty where nothing of the script draws."""


@final
class SameData:
    """Has ranks compare a few samples of an epoch, and its order, in the first pause of it."""

    def __init__(self, loaders: Mapping[str, ShardedLoader]) -> None:
        self._loaders = {name: loader for name, loader in loaders.items() if _is_dealt_out(loader)}
        self._told: dict[str, Told] = {}

    def said(self) -> dict[str, list[Any]]:
        """What this rank tells the others in a pause, by loader."""
        for name, loader in self._loaders.items():
            before = self._told.get(name)
            epoch, samples = before[:2] if before is not None else (-1, [])
            if epoch != loader.place.epoch:
                epoch, samples = loader.look() or (epoch, samples)
            self._told[name] = Told(epoch, samples, *loader.order)
        return {name: list(told) for name, told in self._told.items()}

    def require(self, everyone: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        """Compare what ranks have said that are in the same epoch.

        Raises:
            UsageError: a sample differs between two ranks that does not differ from one look to the next, or the order.
        """
        for name, loader in self._loaders.items():
            told = [Told(*theirs[name]) for theirs in everyone if name in theirs]
            for rank, theirs in enumerate(told):
                if theirs.epoch == told[0].epoch:
                    number = first_unlike(told[0].samples, theirs.samples)
                    if number is not None:
                        place = places(len(loader.dataset), theirs.epoch)[number]
                        raise _other_samples(name, rank, theirs.epoch, place)
                if theirs.order_epoch == told[0].order_epoch and theirs.order != told[0].order:
                    raise _other_order(name, rank, theirs.order_epoch)


def _is_dealt_out(loader: ShardedLoader) -> bool:
    dataset = loader.dataset
    is_read_here = not isinstance(dataset, IterableDataset) and loader.roster is None
    return is_read_here and not getattr(dataset, DIFFERS, False)


def _other_samples(name: str, rank: int, epoch: int, place: int) -> UsageError:
    return UsageError(
        f"epoch {epoch}: the data set of the loader {name!r} is not the same on ranks 0 and {rank} (sample {place} "
        "differs), and prepare deals out one data set by its indices: samples would be trained on twice, or never. "
        "Give every rank the whole data set in the same order: sort lists of files, change samples alike, and shuffle "
        "or split with a generator of the same seed on every rank. If its samples are to differ by rank, set "
        f"dataset.{DIFFERS} = True"
    )


def _other_order(name: str, rank: int, epoch: int) -> UsageError:
    return UsageError(
        f"epoch {epoch}: the sampler of the loader {name!r} draws another order on rank {rank} than on rank 0, and "
        "prepare deals out one order: samples would be trained on twice, or never. Have it draw from the global "
        "generators, and from weights or lists that are the same on every rank, as worker.all_reduce makes them"
    )
