"""How a gloo group goes that has operations under way."""

from typing import Any

from paceline.comm.exit_wait import start_thread

ENDS_WITHIN_S = 0.5


def destroy(held: list[Any]) -> None:
    """Destroy the group in this list, which nobody else holds. It goes when its operations are over. This call waits
    for that only so long: after it, a thread does.

    When their connections end, operations fail at once, but for one that has sent or received a part of a message. gloo
    forgets to tell that one (`Pair::signalException` of its TCP transport looks at messages that wait, not at those on
    their way), and it ends with its time-out, which may be minutes. It writes nothing any more.
    """
    start_thread(held.clear, name="paceline-ending").join(ENDS_WITHIN_S)
