"""Which servers hold a copy of each key range, in which order, and who serves it when some have died."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final


@final
@dataclass(frozen=True)
class Chain:
    """Those that hold a key range: the first serves it, and each hands on to the next what it has done."""

    key_range: int
    servers: tuple[int, ...]
    epoch: int
    """Counts who has served it."""

    @property
    def head(self) -> int:
        return self.servers[0]

    def before(self, server: int) -> int | None:
        place = self.servers.index(server)
        return self.servers[place - 1] if place else None

    def after(self, server: int) -> int | None:
        place = self.servers.index(server) + 1
        return self.servers[place] if place < len(self.servers) else None

    def without(self, server: int) -> "Chain":
        left = tuple(each for each in self.servers if each != server)
        return replace(self, servers=left, epoch=self.epoch + (self.servers[0] == server))


@final
@dataclass(frozen=True)
class Chains:
    """Of all key ranges, the first of which the first server has at the start, and so on.

    Chain replication (van Renesse and Schneider, OSDI 2004), with key ranges laid over a ring as in Li et al., OSDI
    2014, section 4.3: a server is first of one chain, and holds copies of `replicas` others.
    """

    chains: tuple[Chain, ...]
    dead: tuple[int, ...] = field(default=())

    @classmethod
    def first(cls, hosts: Sequence[str], *, replicas: int, epoch: int) -> "Chains":
        """Servers on these hosts. Those next to each other on the ring are on different ones, as far as that can be."""
        count = Counter(hosts)
        by_host = sorted(range(len(hosts)), key=lambda server: (-count[hosts[server]], hosts[server], server))
        # Every other place is filled first, with the servers of the largest hosts, then those between.
        ring = [0] * len(hosts)
        ring[::2], ring[1::2] = by_host[: (len(hosts) + 1) // 2], by_host[(len(hosts) + 1) // 2 :]
        follows = {server: [*ring[place:], *ring[:place]][: replicas + 1] for place, server in enumerate(ring)}
        return cls(tuple(Chain(index, tuple(follows[index]), epoch) for index in range(len(hosts))))

    def died(self, server: int) -> tuple["Chains", list[Chain]]:
        """The chains without this server, and those of them that have changed. One that is empty now is lost."""
        chains = tuple(chain.without(server) for chain in self.chains)
        changed = [new for old, new in zip(self.chains, chains, strict=True) if new != old]
        return Chains(chains, (*self.dead, server)), changed


def to_body(chain: Chain) -> dict[str, object]:
    """A message's body that says it."""
    return {"key_range": chain.key_range, "servers": list(chain.servers), "epoch": chain.epoch}


def from_body(body: Mapping[str, object]) -> Chain:
    """Raises ValueError if this is nothing that `to_body` gives."""
    key_range, servers, epoch = body.get("key_range"), body.get("servers"), body.get("epoch")
    if not isinstance(servers, list) or not all(type(each) is int for each in (key_range, epoch, *servers)):
        raise ValueError(f"refused {body!r} as a chain of servers")
    return Chain(key_range, tuple(servers), epoch)  # type: ignore[arg-type]
