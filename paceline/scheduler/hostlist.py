"""SLURM's short form of a list of hosts, such as `gpu[01-03,7],login`."""

import re
from collections.abc import Iterator
from itertools import product

from paceline.errors import UsageError

_MOST = 100_000
"""Hosts of a list; SLURM's own limit is of this order."""


def expand(hostlist: str) -> list[str]:
    """The hosts by name, in the order of the list; a number keeps its leading zeros.

    >>> expand("gpu[01-03,7],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']

    Raises:
        UsageError: it is no such list, or has more than 100,000 hosts.
    """
    hosts: list[str] = []
    for part in _parts(hostlist):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # text and the insides of brackets, in turn
        if any("[" in text or "]" in text for text in pieces[::2]):
            raise _not_a_list(hostlist)
        choices = [list(_numbers(piece, hostlist)) if number % 2 else [piece] for number, piece in enumerate(pieces)]
        for chosen in product(*choices):
            hosts.append("".join(chosen))
            if len(hosts) > _MOST:
                raise UsageError(f"the list of hosts {hostlist!r} has more than {_MOST:,}")
    return hosts


def _parts(hostlist: str) -> Iterator[str]:
    """What stands between commas that are in no brackets."""
    for part in re.split(r",(?![^\[\]]*\])", hostlist):
        if not part.strip():
            raise _not_a_list(hostlist)
        yield part.strip()


def _numbers(inside: str, hostlist: str) -> Iterator[str]:
    for span in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if match is None:
            raise _not_a_list(hostlist)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST:
            raise _not_a_list(hostlist)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _not_a_list(hostlist: str) -> UsageError:
    return UsageError(f"{hostlist!r} is not a list of hosts as SLURM writes it, such as gpu[01-03,7],login")
