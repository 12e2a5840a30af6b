"""How the ranks of a group tell one another something through torch's store, before they have a collective."""

import time
from collections.abc import Callable

from torch.distributed import DistNetworkError, Store

from paceline.errors import DeadlineExceeded, PeerLost

_TURN_S = 0.01


def exchange(
    store: Store,
    mine: str,
    *,
    rank: int,
    size: int,
    deadline_s: float | None,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """What each rank says, in rank order. Collective call.

    Args:
        store: where the ranks find one another; nobody else may use its keys.
        deadline_s: the longest wait for any one rank; None for ever.
        check: called again and again during a wait, which ends with what it raises.

    Raises:
        DeadlineExceeded: a rank did not come; the message names it.
        PeerLost: the store is gone, with the process that kept it.
    """
    try:
        store.set(_key(rank), mine)
        return [_said_by(other, store, deadline_s, check) for other in range(size)]
    except DistNetworkError as error:
        raise PeerLost(f"rank 0 is lost, or the launcher, which kept the store where ranks meet: {error}") from None


def _said_by(rank: int, store: Store, deadline_s: float | None, check: Callable[[], None]) -> str:
    began_s = time.monotonic()
    # Asked again and again: torch's own wait cannot be ended from outside, and logs warnings where it is short.
    while not store.check([_key(rank)]):
        check()
        if deadline_s is not None and time.monotonic() - began_s > deadline_s:
            raise DeadlineExceeded(
                f"rank {rank} has not come to the process group within {deadline_s} s; see whether it runs"
            )
        time.sleep(_TURN_S)
    return str(store.get(_key(rank)).decode())


def _key(rank: int) -> str:
    return f"rank {rank}"
