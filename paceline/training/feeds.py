"""The loaders of a run, each with what is known of its batches."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from paceline.checkpoint import WorkerState
from paceline.errors import UsageError
from paceline.strategies.progress import Progress
from paceline.training.handouts import Handouts
from paceline.training.sharding import Place, ShardedLoader


class Feed(NamedTuple):
    """One loader."""

    loader: ShardedLoader
    handouts: Handouts

    @property
    def place(self) -> Place:
        """The place of the first batch that the script has not trained on."""
        return self.handouts.place(self.loader.place)


@final
class EachHandouts:
    """The handouts of several loaders, whose batches all count alike: a gradient may be of one of each."""

    def __init__(self, each: Sequence[Handouts]) -> None:
        self._each = tuple(each)

    def progress(self) -> Progress:
        """As `Handouts.progress`, with the batches of all loaders."""
        each = [handouts.progress() for handouts in self._each]
        return Progress(each[0].num_steps, sum(progress.num_batches for progress in each))

    @property
    def fresh(self) -> bool:
        """As `Handouts.fresh`, of any loader's."""
        return any(handouts.fresh for handouts in self._each)

    @property
    def has_trained(self) -> bool:
        """Whether a batch of any loader was trained on."""
        return any(handouts.has_trained for handouts in self._each)

    @property
    def are_gradients_spent(self) -> bool:
        """As `Handouts.are_gradients_spent`."""
        return all(handouts.are_gradients_spent for handouts in self._each)

    def look_back(self, *, is_computed: bool = False) -> None:
        """As `Handouts.look_back`."""
        for handouts in self._each:
            handouts.look_back(is_computed=is_computed)

    def end_step(self) -> int:
        """The samples of the first loader that the step has trained on."""
        found = [handouts.end_step() for handouts in self._each]
        return next((samples for samples in found if samples), 0)

    def close(self) -> None:
        for handouts in self._each:
            handouts.close()


def joined(each: Sequence[Handouts]) -> Handouts | EachHandouts:
    return each[0] if len(each) == 1 else EachHandouts(each)


def require_even(name: str, is_even: bool) -> None:
    """Raises UsageError for batches of different weights, where gradients may be of several loaders' batches."""
    if not is_even:
        raise UsageError(
            f"the last batches of {name!r} differ in size from worker to worker and so would count differently, and "
            "with several loaders nothing tells which gradient is of which batch; give the DataLoader drop_last=True, "
            "or a batch size that divides the data evenly. A loader that is only evaluated on need not be prepared"
        )


def identity_of(feeds: Mapping[str, Feed]) -> dict[str, Any]:
    """What tells the data from other data, by name; the first loader's as if it were alone."""
    (_, first), *others = feeds.items()
    return first.loader.identity | {f"{name}.{key}": v for name, o in others for key, v in o.loader.identity.items()}


def looks_of(feeds: Mapping[str, Feed]) -> dict[str, Any]:
    """By the loader's name, what tells its samples from others, where that is known."""
    looks = {name: feed.loader.first_look for name, feed in feeds.items()}
    return {name: look for name, look in looks.items() if look is not None}


def expect(feeds: Mapping[str, Feed], looks: Mapping[str, Any]) -> None:
    """Loaders of these names are to have such samples."""
    for name, feed in feeds.items():
        if name in looks:
            feed.loader.expect(looks[name])


def places_beside(feeds: Mapping[str, Feed]) -> dict[str, tuple[int, int, Any]]:
    """Where the loaders after the first are."""
    return {name: tuple(feed.place) for name, feed in list(feeds.items())[1:]}


def resume(feeds: Mapping[str, Feed], state: WorkerState, data: Mapping[str, Any]) -> None:
    """Have every loader skip to where it was. Raises UsageError if one was not there, or had other data."""
    for index, (name, feed) in enumerate(feeds.items()):
        if index == 0:
            place = Place(state.epoch, state.num_batches_done, state.stream)
            identity = {key: value for key, value in data.items() if "." not in key}
        elif name in state.beside:
            place = Place(*state.beside[name])
            identity = {
                key.removeprefix(f"{name}."): value for key, value in data.items() if key.startswith(f"{name}.")
            }
        else:
            raise UsageError(f"the checkpoint has no place in the data of {name!r}; resume with the same loaders")
        feed.loader.resume_at(place, identity)
