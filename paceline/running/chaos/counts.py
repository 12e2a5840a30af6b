"""What the servers of a struck run have written down of their copies, and which gradients each copy is made of by that.

A copy that was made later is made of what its giver's had up to an entry of the chain, and of what its own server has
written since. That may go back over several givers.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

from paceline.records import EventRecord, read_records

Gradient = tuple[int, int]
"""Its worker, and which one of the worker's it is."""


class _Line(NamedTuple):
    shard: int
    gradient: Gradient
    number: int
    """Of the entry of the chain that has brought it."""


@final
@dataclass
class _Stretch:
    """A time in which a server has had a copy of one key range."""

    giver: str | None = None
    """Whose copy it is one of; none: it was there from the start."""
    number: int = 0
    """Of the last entry that was part of it when it began."""
    since_ns: int = 0
    lines: list[_Line] = field(default_factory=list)


Told = Mapping[str, Mapping[int, list[_Stretch]]]
"""By server and key range: those times, one after the other."""


def read(folder: Path) -> Told:
    """What is in the folder's files; empty where no server has written anything."""
    return {path.name: _stretches(path.read_text()) for path in folder.iterdir() if path.stat().st_size}


def _stretches(text: str) -> Mapping[int, list[_Stretch]]:
    found: dict[int, list[_Stretch]] = defaultdict(list)
    for line in text.splitlines():
        words = line.split()
        of_range = found[int(words[0])]
        if words[1] == "from":
            of_range.append(_Stretch(f"server-{words[2]}", int(words[3]), int(words[4])))
        else:
            if not of_range:
                of_range.append(_Stretch())
            shard, worker, clock, number = map(int, words[1:])
            of_range[-1].lines.append(_Line(shard, (worker, clock), number))
    return found


Holding = tuple[str, int]
"""A server, and a key range of which it has a copy."""


def at_start(told: Told) -> set[Holding]:
    """Who had which copies before any was given."""
    return {
        (server, key_range)
        for server, of_server in told.items()
        for key_range, stretches in of_server.items()
        if stretches[0].giver is None
    }


def shards(told: Told) -> Mapping[int, set[int]]:
    """Of each key range."""
    found: dict[int, set[int]] = defaultdict(set)
    for of_server in told.values():
        for key_range, stretches in of_server.items():
            found[key_range] |= {line.shard for stretch in stretches for line in stretch.lines}
    return found


def holders(start: Set[Holding], out: Path) -> set[Holding]:
    """Who has which copies at the run's end, if they are left: they had one at the start or were given one, and have
    not let go of it."""
    held = set(start)
    for event in read_records(out, EventRecord):
        if event.name in ("copied", "released"):
            change = held.add if event.name == "copied" else held.discard
            change((event.who, int(event.details["key_range"])))
    return held


def was_given(told: Told, server: str, key_range: int) -> bool:
    """Whether this server has written that another one's copy of the key range came to it."""
    return any(each.giver is not None for each in told.get(server, {}).get(key_range, []))


def counted(told: Told, server: str, key_range: int) -> Counter[tuple[int, Gradient]]:
    """How often this server's copy of the key range is made of each gradient, by shard."""
    stretches = told.get(server, {}).get(key_range, [])
    return _up_to(told, stretches[-1], key_range) if stretches else Counter()


def _up_to(told: Told, stretch: _Stretch, key_range: int, number: int | None = None) -> Counter[tuple[int, Gradient]]:
    """Of the entries up to this one; none: of all."""
    lines = [line for line in stretch.lines if number is None or line.number <= number]
    found = Counter((line.shard, line.gradient) for line in lines)
    if stretch.giver is not None:
        of_giver = told.get(stretch.giver, {}).get(key_range, [])
        before = [each for each in of_giver if each.since_ns < stretch.since_ns]
        if before:
            found += _up_to(told, before[-1], key_range, stretch.number)
    return found
