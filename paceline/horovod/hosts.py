"""Hosts as Horovod's launcher takes them."""

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import UsageError


class Host(NamedTuple):
    name: str
    slots: int


def parse_hosts(texts: Iterable[str], *, slots: int = 1) -> list[Host]:
    """Hosts of `name:slots`. Raises UsageError for another form, and for a host named twice.

    Args:
        slots: of hosts that do not say.
    """
    hosts = []
    for text in texts:
        name, _, count = text.strip().partition(":")
        if not name or (count and not count.isdigit()) or count == "0":
            raise UsageError(f"{text!r} is not of the form host:slots")
        if name.startswith("-") or len(name.split()) > 1:  # ssh would take it for an option of its own
            raise UsageError(f"{name!r} is no name of a host")
        hosts.append(Host(name, int(count or slots)))
    twice = [name for name, times in Counter(host.name for host in hosts).items() if times > 1]
    if twice:
        raise UsageError(f"host {twice[0]} is named twice; give it once, with all of its slots")
    return hosts


def lines_of(hostfile: Path) -> list[str]:
    """A hostfile's hosts, as `parse_hosts` takes them. Raises UsageError if it cannot be read."""
    try:
        lines = [line.split("#")[0].strip() for line in hostfile.read_text().splitlines()]
    except OSError as error:
        raise UsageError(f"cannot read the hostfile {hostfile}: {error.strerror}") from None
    return [":".join(line.replace("slots=", " ").split()) for line in lines if line]


def is_here(name: str) -> bool:
    """Whether a host's name is this one's."""
    return name in {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}


def fill(hosts: Sequence[Host], num_proc: int) -> list[str]:
    """Each rank's host, host by host as they are named. Raises UsageError if there are too few slots."""
    names = [host.name for host in hosts for _ in range(host.slots)]
    if num_proc > len(names):
        raise UsageError(f"-np {num_proc} is more than the {len(names)} slots of the hosts")
    return names[:num_proc]


def places(hosts: Sequence[str]) -> list[dict[str, int]]:
    """Each rank's variables, from its host's name; ranks are host by host."""
    sizes = Counter(hosts)
    found, before = [], Counter[str]()
    for rank, host in enumerate(hosts):
        local_rank = before[host]
        before[host] += 1
        others = [name for name, size in sizes.items() if size > local_rank]
        found.append(
            {
                "RANK": rank,
                "SIZE": len(hosts),
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": sizes[host],
                "CROSS_RANK": others.index(host),
                "CROSS_SIZE": len(others),
            }
        )
    return found
