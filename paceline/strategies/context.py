"""What an engine gives one worker, with which its half of a strategy works."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.aggregate import Contribution
from paceline.comm.base import Collective, Store
from paceline.comm.mailbox import Mailbox
from paceline.elastic import Done
from paceline.membership import Membership
from paceline.messages import Raw
from paceline.roster import Roster
from paceline.strategies.elsewhere import ClientsElsewhere, ServerElsewhere
from paceline.strategies.pacing import Pacing, RealTime
from paceline.strategies.regrouping import LaneKeeper, Regrouping, Rounds


@dataclass(frozen=True)
class Context:
    """What an engine gives one worker."""

    rank: int
    membership: Membership
    local_rank: int
    local_size: int
    device: torch.device
    collective: Collective
    store: Store | None = None
    """The first optimizer's, for strategies that have servers."""
    store_beside: Callable[[int], Store] | None = None
    """Connects to what the servers hold for another optimizer of the run: the second is number 1. Collective call."""
    connect_mailbox: Callable[[Collective, Membership], Mailbox] | None = None
    """Makes a mailbox among those of this membership, whom the collective connects, for strategies whose messages come
    unasked. Collective call."""
    pacing: Pacing = field(default_factory=RealTime)
    """The clock that this worker's run is timed with, real or virtual."""
    seed: int = 0
    """The run's, the same on every worker."""
    max_steps: int | None = None
    """Iterations after which the run ends, if it ends by their number."""
    hostility: "Hostility | None" = None
    """What some workers do to harm the run. None: nobody attacks."""
    corrupt_clients: Callable[[Sequence[Contribution], int], list[Contribution]] | None = None
    """Called with what all clients of a round send, and its number: what comes of it where some are hostile, the same
    on every worker. None: nobody attacks."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """What the script's evaluation finds of a model, asked on this worker alone. Raises UsageError where the script
    registers none."""
    off_the_clock: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside, the training clock stands, and workers wait for one another as long as it takes. Every worker enters it
    where one does something for all that is not training."""
    tell: Callable[[str, Mapping[str, Any]], None] | None = None
    """Records an event of the whole run, from the first worker."""
    log: Callable[[Mapping[str, float]], None] | None = None
    """Records metrics of this worker, as the script does."""
    data_samples: int = 0
    """Samples in the script's data set; of several loaders, in the first one's. 0: a stream, which does not say."""
    roster: Roster | None = None
    """The clients' turns that this worker plays, under strategies that have clients."""
    clients: ClientsElsewhere | None = None
    """On a server whose clients are elsewhere: carries rounds to them."""
    server: ServerElsewhere | None = None
    """On a client whose server is elsewhere: carries rounds from it."""

    reform: Regrouping | None = None
    """Where workers come, leave and die while the others go on: how they are told of one another."""
    num_first: int | None = None
    """There, the workers that were there before anybody joined: those of rank 0 to before this."""
    num_at_start: int | None = None
    """The workers that the run began with, by which an elastic one's global batches are as large as they are."""
    recovery: "Recovery | None" = None
    """There, what a synchronizer asks that repeats a step."""
    redealing: "Redealing | None" = None
    """There, what a synchronizer asks that ends a round of clients."""
    lane_keeper: LaneKeeper | None = None
    """There, who knows who has which of the data, under strategies whose workers take their own steps."""
    done: Callable[[], Done] | None = None
    """There, how far this worker is once the step is over that is under way."""
    reunion: "Reunion | None" = None
    """There, what a synchronizer asks that meets the others anew between two of its steps."""
    rounds: Rounds | None = None
    """There, what a synchronizer asks under servers if all workers have a part in each round."""

    @property
    def size(self) -> int:
        """How many workers train together."""
        return self.membership.size

    @property
    def has_peers(self) -> bool:
        """Whether others train beside this worker, or may come to."""
        return self.size > 1 or self.reform is not None

    @property
    def is_first(self) -> bool:
        """Whether this worker does what one does for all."""
        return self.rank == self.membership.ranks[0]

    @property
    def num_named(self) -> int:
        """The workers that an attack's hostile ones are the last of: who joins later is honest."""
        return self.num_first or self.size

    def corrupt(self, tensors: Sequence[Tensor], step: int, *, weights: Sequence[float] = ()) -> None:
        """What this worker is about to send becomes what an attack makes of it, in place, if it is hostile. Where
        workers meet at each exchange it is a collective call, if there is an attack.

        Args:
            step: the same on all workers.
            weights: of what each worker is about to send, where some have no samples and so send nothing; none: all
                have some.
        """
        if self.hostility is not None:
            self.hostility.corrupt(tensors, step, context=self, weights=weights)


class Hostility(Protocol):
    """What an attack does to what workers send."""

    def corrupt(self, tensors: Sequence[Tensor], step: int, *, context: Context, weights: Sequence[float]) -> None:
        """As `Context.corrupt`, among the workers of this context."""


class Reunion(Protocol):
    """What a synchronizer is told whose workers meet anew when some are gone or others join."""

    had: Callable[[], Mapping[int, Done]]
    """The synchronizer's: by worker, how far its work is in this one's parameters."""
    taken: Mapping[int, Done]
    """The same, of the state that this worker has joined with; empty for others."""

    @property
    def is_due(self) -> bool:
        """Whether this worker has given its state to one who joins, and meets that one before it takes a step."""

    def meet(self) -> Context:
        """Return with those who go on. Collective call of these."""

    def leave_to_others(self, gone: Mapping[int, Done]) -> None:
        """These workers are gone, and so far their work is in others' models: the rest of their data is for all. To be
        said by each worker, before it asks for data."""


class Redealing(Protocol):
    """What a synchronizer is told in whose rounds clients' turns are dealt anew when workers are gone."""

    last_result: Callable[[], Sequence[Raw]]
    """The synchronizer's: what the last round that counts has come to, for those that have missed it."""

    @property
    def has_given(self) -> bool:
        """Whether this worker has given its state to one who joins, and the round is to end with that one there."""

    @property
    def trained(self) -> tuple[int, int]:
        """Samples and batches that this worker has trained on in the round."""

    def commit(self, trained: tuple[int, int]) -> None:
        """All have the round's result, which is of so many samples and batches."""

    def regroup(self) -> Context:
        """Somebody is lost, or comes: the surroundings in which those who are there end the round. Collective call of
        these. Raises ResultHandedOn where others have the round's result, which this worker is to take up, too."""


class Recovery(Protocol):
    """What a synchronizer that repeats steps is told about the data and the other workers."""

    last_result: Callable[[], Sequence[Raw]]
    """The synchronizer's: what the last step that was committed has made of all workers' gradients, for those that have
    missed it."""

    @property
    def has_given(self) -> bool:
        """Whether this worker has given its state to one who joins, and its next part is to be averaged with that one
        taking part."""

    @property
    def begins_update(self) -> bool:
        """Whether an update begins with the round that is under way; otherwise it goes on with an earlier one's."""

    @property
    def weight(self) -> float:
        """This worker's share of the update, times the number of workers that are left."""

    @property
    def weights(self) -> tuple[float, ...]:
        """As `weight`, of each worker that is left: the same on all."""

    @property
    def share(self) -> float:
        """What all of them together have of the update in the round that is under way."""

    @property
    def num_dealt(self) -> int:
        """Batches that each worker has been dealt up to now: the same number on all."""

    def weight_of(self, first: int, stop: int) -> float:
        """The mean of this worker's weights in the batches from one number on, counted from 0, to before another, as if
        those who are there now had been alone."""

    def weights_of(self, first: int, stop: int) -> tuple[float, ...]:
        """As `weight_of`, of each worker that is left: the same on all."""

    def commit(self, *, asks_from: int | None = None) -> bool:
        """All have the round's result. Returns whether the update has all its samples. Raises UsageError where nobody
        can tell which batch it was.

        Args:
            asks_from: the first batch that `weight_of` may be asked for yet; none: none before the next.
        """

    def regroup(self) -> Context:
        """Somebody is lost, or comes: the surroundings in which those who are there repeat the round. Collective call
        of these. Raises ResultHandedOn where others have the round's result, and this worker is to commit it, too."""
