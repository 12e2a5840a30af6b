"""The loader that a script gets: its rank's part of the data, epoch after epoch, until the run ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import BudgetReached, UsageError
from paceline.hooks import Telling
from paceline.roster import Participation, Roster
from paceline.training.sharding.after_end import AfterEnd
from paceline.training.sharding.clients import ClientBatches, NoBatches
from paceline.training.sharding.division import RankBatch
from paceline.training.sharding.fingerprint import Fingerprint
from paceline.training.sharding.looks import Looks
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import DIFFERS, DIFFERS_BY_RUN, Part, Place, Source
from paceline.training.sharding.stand_in import StandIn
from paceline.training.sharding.streams import Gather, Stream

_MAX_IDLE_EPOCHS = 1000
_OWN = ("__iter__", "_get_iterator", "_index_sampler")
"""What a class of loaders iterates by."""


@final
class ShardedLoader(StandIn):
    """This rank's part of a `DataLoader`, with its data set, collation and worker processes.

    The order of an epoch is drawn from (seed, epoch), the same on every rank. Iterating ends early once `should_stop()`
    is true; after a resume the epochs already trained are empty, and the first one that is not starts where the
    checkpoint was taken. A script that leaves its loop early goes on with the next epoch.

    Args:
        on_return: called when the script comes back: for its next batch, or for a new epoch. Returns what `should_stop`
            does after that.
        on_part: called with each batch and its place before it is handed out.
        on_position: called once when the position to resume from is reached.
        poison: what an attack makes of each batch.
        on_pass: called when a pass begins that may hand out batches.
        on_pass_end: called when it has handed out all of them, and the script asks for one more.
        gather: every rank's value, in rank order; a collective call.
        takes_equal_steps: whether all ranks are to have as many batches.
        dealing: what deals the samples of map-style data out, where workers may die.
        is_kept: whether checkpoints are to say of what data they are.
        participation: of clients, each pass being over the data of one; none: over this rank's part of all data.
        players: ranks that play these clients' turns at first, where workers come and go; none: all, for good.

    A script's remaining epochs are empty after that, but for passes of map-style data that are none of training (see
    `AfterEnd`); one that loops for ever is ended by `BudgetReached`.

    Raises:
        UsageError: the loader is of a class with an iteration of its own, or its data cannot be divided.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        size: int,
        seed: int,
        on_return: Callable[[], bool] | None = None,
        on_part: Callable[[Part, Place], None] = lambda part, place: None,
        on_position: Callable[[], None] = lambda: None,
        poison: Callable[[Any], Any] | None = None,
        on_pass: Callable[[], None] = lambda: None,
        on_pass_end: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
        gather: Gather = lambda value: [value],
        takes_equal_steps: bool = False,
        participation: Participation | None = None,
        players: Sequence[int] | None = None,
        dealing: Callable[[Orders], Source] | None = None,
        is_kept: bool = False,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(f"prepare takes a torch DataLoader, not {type(loader).__name__}")
        if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in _OWN):
            raise UsageError(
                f"{type(loader).__name__} iterates in a way of its own; use a plain DataLoader, and have its "
                "collate_fn or data set do what it does with batches or samples"
            )
        self._loader, self._rank = loader, rank
        self._on_return, self._should_stop = on_return or should_stop, should_stop
        self._on_part, self._on_position, self._poison = on_part, on_position, poison
        self._on_pass, self._on_pass_end = on_pass, on_pass_end
        self._source: Source
        self._orders: Orders | None = None
        self._looks: Looks | None = None
        self.roster: Roster | None = None
        """Says whose turn each pass is, where there are clients."""
        if participation is not None and not participation.is_played:
            self._source = nobody = NoBatches(loader, participation)
            self.roster = nobody.roster
        elif participation is not None:
            self._source = clients = ClientBatches(
                loader,
                participation,
                rank=rank,
                ranks=range(size) if players is None else players,
                seed=seed,
                are_dealt_anew=players is not None,
            )
            self.roster = clients.roster
            self._looks = clients.looks
        elif dealing is not None:
            if isinstance(loader.dataset, IterableDataset):
                raise UsageError("--elastic deals samples anew, which streams do not allow; use a map-style data set")
            self._orders = Orders(loader, rank=rank, size=size, seed=seed)
            self._source = dealing(self._orders)
        elif isinstance(loader.dataset, IterableDataset):
            self._source = Stream(
                loader, rank=rank, size=size, seed=seed, gather=gather, takes_equal_steps=takes_equal_steps
            )
        else:
            self._source = self._orders = Orders(loader, rank=rank, size=size, seed=seed)
        if self._orders is not None:
            self._looks = self._orders.looks
        self._has_use_of_looks = is_kept or size > 1
        self._is_compared = not self._has_use_of_looks
        self.place = Place(0, 0)
        """Where the next batch comes from."""
        self._resume_at: Place | None = None
        self._num_idle_epochs = self._num_passes = 0
        self._is_in_pass = False
        self._after_end, self._tell = AfterEnd(), Telling()
        self.identity = self._source.identity()
        """What tells this data from other data, by name."""
        self.is_even = self._source.is_even
        """Whether all batches are known to count alike on all ranks, or nothing is known."""
        _require_same(self.identity, gather)

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, epoch: int) -> list[RankBatch]:
        """This rank's indices of an epoch of map-style data."""
        assert isinstance(self._source, Orders)
        return list(self._source.batches(epoch))

    @property
    def order(self) -> tuple[int, str]:
        """As `Orders.order`."""
        return self._orders.order if self._orders is not None else (0, "")

    def look(self) -> tuple[int, Fingerprint] | None:
        """As `Looks.at`, in the epoch that the loader is in, of map-style data that are dealt out."""
        return None if self._orders is None else self._orders.looks.at(self.place.epoch)

    @property
    def first_look(self) -> Fingerprint | None:
        """What tells the samples from others: as the first pass began, or as a checkpoint says, if either is known."""
        return None if self._looks is None else self._looks.first or self._looks.expected

    def expect(self, look: Fingerprint) -> None:
        """The samples are to be those that this is the first look at; compared when the first pass begins."""
        if self._looks is not None:
            self._looks.expected = look

    def resume_at(self, place: Place, identity: dict[str, Any]) -> None:
        """Skip to a checkpoint's place in the data.

        Raises:
            UsageError: the checkpoint was taken with other data or batches, in which the place would be another.
        """
        own = self.identity
        for name, value in identity.items():
            if own.get(name) != value:
                raise UsageError(
                    f"the checkpoint's DataLoader {_as_text(name, value)}, this one {_as_text(name, own.get(name))}; "
                    "resume with the same data set, batch size and order, or start a new run from model.safetensors"
                )
        self._resume_at = place

    @property
    def passes_over(self) -> bool:
        """Whether the pass that begins is one that the run has behind it, and empty here."""
        return self._resume_at is not None and self.place.epoch < self._resume_at.epoch

    def begin_at(self, place: Place | None = None) -> None:
        """The next pass begins there, whatever was read before; none: at the place to resume from, at once, or with the
        next epoch where this one has nothing left."""
        if place is None:
            place = self._resume_at or self.place
            with suppress(TypeError):  # of a stream nobody knows the length
                place = Place(place.epoch + 1, 0) if place.num_batches_done == len(self) else place
        self._resume_at = place
        self._is_in_pass, self.place = False, Place(self._resume_at.epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        with self._tell:  # all in one generator: each further one costs a call a batch
            is_over = self._on_return()
            self._after_end.begin()
            if is_over:
                if self._orders is not None and self._source is self._orders and self._after_end.has_batches():
                    yield from (part.data for part in self._orders.parts(Place(self.place.epoch, 0)))
                    return
                self._num_idle_epochs += 1
                if self._num_idle_epochs > _MAX_IDLE_EPOCHS:
                    raise BudgetReached("the run has ended, and the script goes on asking for epochs")
                return
            if self._is_in_pass:  # which the script has left, and keeps
                self._is_in_pass, self.place = False, Place(self.place.epoch + 1, 0)
            epoch = self.place.epoch
            if self.passes_over:
                self._look(reads=False)
                self.place = Place(epoch + 1, 0)
                if self._orders is not None:
                    self._orders.pass_over(epoch)
                return
            is_resumed = self._resume_at is not None
            self.place, self._resume_at = self._resume_at or Place(epoch, 0), None
            if is_resumed:
                self._on_position()
            self._on_pass()
            if self._should_stop():
                return
            self._num_passes += 1
            own_pass, own = self._num_passes, vars(self)  # which no script sets here, so that StandIn need not look
            self._is_in_pass = True
            self._look(reads=True)
            for part in self._source.parts(self.place):
                if not self._is_compared:
                    self._require_same_samples()
                if self._poison is not None:
                    part = part._replace(data=self._poison(part.data))
                self._on_part(part, self.place)
                own["place"] = tuple.__new__(Place, (epoch, self.place.num_batches_done + 1, part.state))
                try:
                    yield part.data
                except GeneratorExit:
                    if not self._should_stop() and own_pass == self._num_passes:
                        self._is_in_pass, self.place = False, Place(epoch + 1, 0)
                    raise
                if own_pass != self._num_passes:
                    raise UsageError(
                        f"rank {self._rank}: the script goes on with a pass over the loader after it has begun "
                        "another, and nothing tells where in its data the run is; end one before the other, or prepare "
                        "two loaders by name: prepare(..., first=loader, second=another)"
                    )
                if self._on_return():
                    return
            self._is_in_pass, self.place = False, Place(epoch + 1, 0)
            self._on_pass_end()

    def _look(self, *, reads: bool) -> None:
        """A pass begins. `reads`: batches will be read in it."""
        if self._has_use_of_looks and self._looks is not None and not getattr(self.dataset, DIFFERS, False):
            self._looks.begin(self.place.epoch, reads=reads)
            self._require_same_samples()

    def _require_same_samples(self) -> None:
        """Raise UsageError if the data are not those of the checkpoint, as far as is known by now."""
        if self._is_compared or self._looks is None:
            return
        self._looks.note()
        self._is_compared = self._looks.first is not None
        place = self._looks.other_sample()
        if place is not None and not getattr(self.dataset, DIFFERS_BY_RUN, False):
            raise UsageError(
                f"rank {self._rank}: sample {place} of the data set is not what it was when the checkpoint's run "
                "began, as in another order of files or another random split; resume with the same data set, or start "
                "a new run from model.safetensors. If the run is to go on with other samples in their places, set "
                f"dataset.{DIFFERS_BY_RUN} = True"
            )


def _require_same(identity: dict[str, Any], gather: Gather) -> None:
    """Compare all ranks' data. Collective call.

    Raises:
        UsageError: on every rank, naming the first rank that differs from rank 0.
    """
    everyone = gather(identity)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                raise UsageError(
                    f"rank 0's DataLoader {_as_text(name, value)}, rank {rank}'s {_as_text(name, theirs.get(name))}; "
                    "give every rank the same data set, batch size and order: prepare divides them"
                )


def _as_text(name: str, value: Any) -> str:
    return f"draws the order {value}" if name == "order" else f"has {name} {value}"
