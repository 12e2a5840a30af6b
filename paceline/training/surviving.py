"""What a worker's run asks where others come, leave and die, whatever its strategy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from paceline.checkpoint import WorkerState
from paceline.elastic import Member
from paceline.errors import PeerLost, UsageError
from paceline.messages import Raw
from paceline.strategies.base import Context, Synchronizer
from paceline.training.given import Given
from paceline.training.sharding import Place
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Source
from paceline.training.worker_run import WorkerRun

T = TypeVar("T")


class Surviving(Protocol):
    """Raises UsageError where the script has what cannot be repeated or dealt anew."""

    @property
    def lacks_script(self) -> bool:
        """This worker has joined with schedulers of where a round began that the others have ended."""

    @property
    def counts(self) -> tuple[int, int]:
        """Samples and batches that this worker says in a pause; all workers' add up to what the run was trained on."""

    def attach(self, given: Given) -> None:
        """Look at what the script has prepared."""

    def deals(self, orders: Orders) -> Source:
        """What deals out the samples of the loader."""

    def require_between_rounds(self, place: str) -> None:
        """Raises UsageError in a round of several steps."""

    def require_prepared_schedulers(self, given: dict[str, Any], optimizer: Any) -> None:
        """Raises UsageError for a scheduler that would step where the optimizer does not."""

    def leaves(self) -> bool:
        """Whether this worker has been asked to leave, and has left."""

    def enters(self) -> bool:
        """Whether this worker, which joins, takes part from here on."""

    def give(self, place: Place) -> None:
        """Give this worker's state to those who wait for one, before the batch that comes from this place."""

    def for_later(self, worker: WorkerState) -> WorkerState:
        """What a checkpoint holds of this worker."""

    def in_pause(self, worker: WorkerState) -> WorkerState:
        """What the first one's has of all workers besides, as they are in this pause."""

    def go_on_from(self, workers: Sequence[WorkerState], *, iteration: int) -> list[WorkerState]:
        """A checkpoint has these. Returns what each worker of this run goes on from."""

    def share_script(self) -> None:
        """Whoever lacks it takes up what the first worker's script has moved on. Collective call in a pause."""

    def repeated(self, meet: Callable[[], T], part: Callable[[], None], synchronizer: Synchronizer) -> T:
        """What `meet` returns, which is called anew by those who are left when somebody dies in it.

        Args:
            part: has all wait until each has all of the meeting. If somebody dies in that, some may have gone on; then
                all do.
        """


def require_one_of_each(given: Given) -> None:
    """Raises UsageError for several optimizers or loaders."""
    if len(given.optimizers) != 1 or len(given.loaders) != 1:
        raise UsageError("--elastic takes one optimizer and one loader so far; leave --elastic out for several")


def regrouped(run: WorkerRun, member: Member, last_result: Callable[[], Sequence[Raw]]) -> Member:
    """This worker, when it goes on with those who are there, whom the run's context then has. Collective call of these.
    Raises ResultHandedOn as `Regrouping`."""
    assert run.context.reform is not None
    member, collective, local_rank, local_size = run.context.reform(member, last_result)
    run.context = replace(
        run.context,
        membership=member.membership,
        collective=collective,
        local_rank=local_rank,
        local_size=local_size,
    )
    return member


def meet_others(
    synchronizer: Synchronizer, regroup: Callable[[], Context], *, facts: Mapping[str, float | str]
) -> None:
    """This worker, which has taken a state, enters the next epoch. Raises StaleEpoch where the others have gone on
    without it.

    Args:
        regroup: as `Recovery.regroup`.
        facts: the others'.
    """
    while True:
        try:
            synchronizer.rejoin(regroup(), facts=facts)
            break
        except PeerLost:
            pass
    synchronizer.enter()


def repeated(
    meet: Callable[[], T],
    part: Callable[[], None],
    *,
    is_whole: bool = True,
    rejoin: Callable[[], None],
    num_met: Callable[[], int],
    end: Callable[[], None],
) -> T:
    """As `Surviving.repeated`.

    Args:
        is_whole: those who are there are connected.
        rejoin: goes on with those who are left. Collective call of these.
        num_met: meetings that are over.
        end: notes that this one is.
    """
    before = num_met()
    found: list[T] = []
    while True:
        try:
            if not is_whole:
                rejoin()
                is_whole = True
            if num_met() == before:
                found = [meet()]
                part()
                end()
            return found[0]
        except PeerLost:
            is_whole = False
