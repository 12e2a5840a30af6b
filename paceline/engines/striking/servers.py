"""Servers with copies of key ranges that are struck, and which write down what each copy is made of."""

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from paceline.engines.striking.arming import VARIABLE, Places, arm
from paceline.messages import Message
from paceline.server.closing import Closed
from paceline.server.replication import Replication

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
)


def arm_server(index: int) -> None:
    """Have this process, a server with copies, struck; it writes down which gradients are part of each copy."""
    arm(f"server-{index}", SERVERS.all)
    if VARIABLE not in os.environ:
        return
    note, repeat = Replication._note, Replication._repeat
    counted = Path(os.environ[VARIABLE], "counted", f"server-{index}").open("ab", buffering=0)  # noqa: SIM115

    def write(copy: Replication, shard: int, gradients: Iterable[tuple[int, int]]) -> None:
        for worker, clock in gradients:
            counted.write(f"{copy.key_range} {shard} {worker} {clock}\n".encode())

    @functools.wraps(note)
    def noted(copy: Replication, shard: int, closed: Closed) -> None:
        write(copy, shard, ((worker, clock) for worker, (clock, _) in closed.contributors.items()))
        note(copy, shard, closed)

    @functools.wraps(repeat)
    def repeated(copy: Replication, entry: Message) -> None:
        repeat(copy, entry)
        write(copy, entry.shard, ((worker, clock) for worker, clock, _ in entry.body.get("contributors", ())))

    setattr(Replication, "_note", noted)  # noqa: B010 - a method is not to be assigned
    setattr(Replication, "_repeat", repeated)  # noqa: B010
