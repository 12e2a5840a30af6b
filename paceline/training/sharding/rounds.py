"""Passes over a round's turns, for loops of which all workers are at the same place when a pass is over."""

from collections.abc import Callable, Iterator
from typing import Any, final

from paceline.errors import UsageError
from paceline.training.sharding.loader import ShardedLoader
from paceline.training.sharding.part import Place
from paceline.training.sharding.stand_in import StandIn


@final
class RoundBatches(StandIn):
    """A prepared loader whose passes are clients' turns, of which a pass here has all that this worker plays in a
    round. So a framework's epoch is a round, and workers validate and save between two of them.

    Args:
        loader: of clients' batches.
        size: how many workers there are.
        is_over: whether the run is, after which passes are empty.

    Raises:
        UsageError: a worker has no turn in the first round. Later, where a pass begins: the one before was left, or
            that is so of its round.
    """

    def __init__(self, loader: ShardedLoader, *, size: int, is_over: Callable[[], bool]) -> None:
        assert loader.roster is not None
        self._loader, self._roster, self._size, self._is_over = loader, loader.roster, size, is_over
        self._round = self._num_done = self._num_left = 0
        self.require_turns_for_all()

    @property
    def place(self) -> Place:
        """The round, and the batches of it that were handed out."""
        return Place(self._round, self._num_done)

    def __len__(self) -> int:
        """This worker's batches in the round that is under way, or comes next."""
        return self.num_batches(self._round)

    def num_batches(self, number: int) -> int:
        """This worker's batches in the round of this number, from 0 on."""
        return self._roster.participation.epochs * sum(turn.num_batches for turn in self._roster.of_round(number))

    def __iter__(self) -> Iterator[Any]:
        self.require_between("another pass over the loader")
        self.require_turns_for_all()
        self._num_done, self._num_left = 0, len(self)
        for _ in self._roster.of_round(self._round):
            for batch in self._loader:
                self._num_done += 1
                self._num_left -= 1
                self._round += not self._num_left
                yield batch
        self._num_left = 0  # also where the run is over

    def begin_at(self, place: Place | None = None) -> None:
        """Raises UsageError."""
        raise UsageError(
            "with clients workers have taken different numbers of steps, and a framework's checkpoint holds one "
            "worker's schedulers and counters for all: begin a new run from the weights, or train in a loop over "
            "worker.prepare's loader, whose runs `paceline run --resume` takes up"
        )

    def require_between(self, place: str) -> None:
        """Raises UsageError in the middle of a round."""
        if self._num_left:
            raise UsageError(
                f"{place}: a round of clients is under way, in which each worker has batches of its own. An epoch is a "
                "round here: go through it to its end, and have workers validate, save and reduce there"
            )

    def require_turns_for_all(self) -> None:
        """Raises UsageError where a worker has no turn in the round that comes next, if it comes."""
        if self._is_over():
            return
        playing = set(self._roster.players(self._round).values())
        idle = [rank for rank in range(self._size) if rank not in playing]
        if idle:
            raise UsageError(
                f"round {self._round + 1} has no client for rank {idle[0]}, whose epoch would have no batch; use fewer "
                f"workers than {self._size}, or more clients a round (fraction)"
            )
