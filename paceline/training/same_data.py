"""Notices map-style data that are not the same on all ranks, which are dealt out by their indices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch.utils.data import IterableDataset

from paceline.errors import UsageError
from paceline.seeding import preserved_random_state, seed_everything
from paceline.training.sharding import DIFFERS, ShardedLoader
from paceline.training.sharding.contents import digest_of, leaves_in

Told = tuple[int, str]
"""An epoch, and a digest of some of the samples."""


@final
class SameData:
    """Has ranks compare a few samples of an epoch in the first pause of it. A data set that is read by loader workers
    alone is left to them: it may hold files open that must not be opened here."""

    def __init__(self, loaders: Mapping[str, ShardedLoader]) -> None:
        self._loaders = {name: loader for name, loader in loaders.items() if _is_dealt_out(loader)}
        self._told: dict[str, Told] = {}

    def said(self) -> dict[str, Told]:
        """What this rank tells the others in a pause, by loader."""
        for name, loader in self._loaders.items():
            epoch = loader.place.epoch
            if name not in self._told or self._told[name][0] != epoch:
                self._told[name] = epoch, digest_of(_looked_at(loader.dataset))
        return dict(self._told)

    def require(self, everyone: Sequence[Mapping[str, Told]], *, gather: Callable[[Any], list[Any]]) -> None:
        """Compare what ranks have said that are in the same epoch. Collective call where it differs.

        Args:
            gather: every rank's value, in rank order; a collective call.

        Raises:
            UsageError: a sample differs between two ranks that does not differ from one look to the next.
        """
        for name in list(self._loaders):
            if not all(name in theirs for theirs in everyone):
                continue  # a rank leaves it to loader workers: all leave it out, since comparing is a collective call
            told = [theirs[name] for theirs in everyone]
            if all(theirs == told[0] or theirs[0] != told[0][0] for theirs in told):
                continue
            dataset = self._loaders[name].dataset
            each = gather(_steady(_looked_at(dataset), _looked_at(dataset)))
            del self._loaders[name]  # no two looks at it are alike, or the run ends here
            for rank, theirs in enumerate(each):
                if told[rank][0] == told[0][0]:
                    self._compare(name, told[0][0], rank, each[0], theirs)

    def _compare(self, name: str, epoch: int, rank: int, first: list[Any], theirs: list[Any]) -> None:
        for number, (one, other) in enumerate(zip(first, theirs, strict=False)):
            if one != other and one is not None and other is not None:
                raise UsageError(
                    f"epoch {epoch}: the data set of the loader {name!r} is not the same on ranks 0 and {rank} (the "
                    f"{('first', 'last')[2 * number // len(first)]} sample differs), and prepare deals out one data "
                    "set by its indices: samples would be trained on twice, or never. Give every rank the whole data "
                    "set in the same order: sort lists of files, and shuffle or split with a generator of the same "
                    f"seed on every rank. If its samples are to differ by rank, set dataset.{DIFFERS} = True"
                )


def _is_dealt_out(loader: ShardedLoader) -> bool:
    dataset = loader.dataset
    is_read_here = not isinstance(dataset, IterableDataset) and loader.num_workers == 0 and loader.roster is None
    return is_read_here and not getattr(dataset, DIFFERS, False)


def _looked_at(dataset: Any) -> list[Any]:
    """The first and the last sample, where there are such, with what is drawn at random alike on all ranks."""
    with preserved_random_state():
        seed_everything(0)
        try:
            return [dataset[0], dataset[len(dataset) - 1]]
        except Exception:  # keys that are no indices, a sample that is broken: whoever reads it will say so
            return []


def _steady(one: list[Any], other: list[Any]) -> list[str | None]:
    """A digest of each part of the samples, none of those that are not the same twice."""
    parts = zip(leaves_in(one), leaves_in(other), strict=False)
    return [digest_of(first) if digest_of(first) == digest_of(second) else None for first, second in parts]
