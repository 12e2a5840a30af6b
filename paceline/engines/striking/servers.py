"""Servers with copies of key ranges that are struck, and which write down what each copy is made of.

A line `key_range shard worker clock number` is a gradient that is part of a copy since this entry of its chain. A line
`key_range from giver number ns` says that the copy begins here, at this time on the host's monotonic clock: with what
another server's had up to this entry.
"""

import functools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.engines.striking.arming import VARIABLE, Places, arm
from paceline.messages import Message
from paceline.server.closing import Closed
from paceline.server.replication import CopyAction, Replication

SERVERS = Places(
    often={
        "is asked": (Replication, "_serve"),
        "takes what the copy before hands on": (Replication, "_take"),
        "hands on to the next copy": (Replication, "_hand_on"),
        "tells the copy before that it has it": (Replication, "_acknowledge"),
    },
    after_a_death={
        "says what it has of a worker that is gone": (Replication, "part_with"),
        "lets a worker go": (Replication, "let_go"),
    },
    at_a_join={"expects a worker": (Replication, "expect"), "lets a worker in": (Replication, "let_in")},
    at_a_move={
        "gives a copy or hands over": (Replication, "_welcome"),
        "has handed over": (Replication, "stepped_back"),
        "hears of another chain": (Replication, "reform"),
    },
    as_joiner={"is given a copy": (Replication, "_take_whole")},
)


def arm_server(index: int) -> None:
    """Have this process, a server with copies, struck; it writes down which gradients are part of each copy."""
    arm(f"server-{index}", SERVERS.all)
    if VARIABLE not in os.environ:
        return
    note, repeat, take_whole = Replication._note, Replication._repeat, Replication._take_whole
    counted = Path(os.environ[VARIABLE], "counted", f"server-{index}").open("ab", buffering=0)  # noqa: SIM115

    def write(copy: Replication, shard: int, gradients: Iterable[tuple[int, int]], number: int) -> None:
        for worker, clock in gradients:
            counted.write(f"{copy.key_range} {shard} {worker} {clock} {number}\n".encode())

    @functools.wraps(note)
    def noted(copy: Replication, shard: int, closed: Closed) -> None:
        number = copy._number + len(copy._new) + 1
        write(copy, shard, ((worker, clock) for worker, (clock, _) in closed.contributors.items()), number)
        note(copy, shard, closed)

    @functools.wraps(repeat)
    def repeated(copy: Replication, entry: Message) -> None:
        repeat(copy, entry)
        contributors = ((worker, clock) for worker, clock, _ in entry.body.get("contributors", ()))
        write(copy, entry.shard, contributors, entry.clock)

    @functools.wraps(take_whole)
    def taken(copy: Replication, entry: Message) -> Iterator[CopyAction]:
        yield from take_whole(copy, entry)
        if not copy._is_new:
            since_ns = time.monotonic_ns()
            counted.write(f"{copy.key_range} from {entry.sender} {copy._number} {since_ns}\n".encode())

    setattr(Replication, "_note", noted)  # noqa: B010 - a method is not to be assigned
    setattr(Replication, "_repeat", repeated)  # noqa: B010
    setattr(Replication, "_take_whole", taken)  # noqa: B010
