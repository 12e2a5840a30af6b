"""Which servers hold a copy of each key range, in which order, who serves it when some have died, and who gets a copy
in their place."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final


class Handover(NamedTuple):
    """A living server is to stop serving a key range."""

    to: int
    """Who has another copy, and serves it then."""
    number: int
    """Each one of a run has its own, so that word of one that was called off is not taken for word of the next."""


@final
@dataclass(frozen=True)
class Chain:
    """Those that hold a key range: the first serves it, and each hands on to the next what it has done."""

    key_range: int
    servers: tuple[int, ...]
    epoch: int
    """Counts who has served it."""
    newcomer: int | None = None
    """Who is being given a copy by the last of them, to come behind it."""
    handover: Handover | None = None
    version: int = field(default=0, compare=False)
    """Counts changes, so that who is built anew passes over what was told before."""

    @property
    def head(self) -> int:
        return self.servers[0]

    @property
    def is_at_rest(self) -> bool:
        """Whether nobody is given a copy, and nobody hands over."""
        return self.newcomer is None and self.handover is None

    def before(self, server: int) -> int | None:
        if server == self.newcomer:
            return self.servers[-1]
        place = self.servers.index(server)
        return self.servers[place - 1] if place else None

    def after(self, server: int) -> int | None:
        if server == self.newcomer:
            return None
        place = self.servers.index(server) + 1
        return self.servers[place] if place < len(self.servers) else None

    def without(self, server: int) -> "Chain":
        if server == self.newcomer:
            return replace(self, newcomer=None)
        left = tuple(each for each in self.servers if each != server)
        newcomer = None if server == self.servers[-1] else self.newcomer  # which had its copy from there
        handover = self.handover if left == self.servers else None
        return Chain(self.key_range, left, self.epoch + (self.servers[0] == server), newcomer, handover, self.version)

    def extended(self) -> "Chain":
        """The newcomer has all that the others have."""
        assert self.newcomer is not None
        return replace(self, servers=(*self.servers, self.newcomer), newcomer=None)

    def handed_over(self) -> "Chain":
        """Its head serves it no more, and comes last."""
        assert self.handover is not None
        head, *others = self.servers
        others.remove(self.handover.to)
        return Chain(self.key_range, (self.handover.to, *others, head), self.epoch + 1, version=self.version)


@final
@dataclass(frozen=True)
class Chains:
    """The chains of all key ranges. At the start the first server has the first key range, and so on.

    Chain replication (van Renesse and Schneider, OSDI 2004), with key ranges laid over a ring as in Li et al., OSDI
    2014, section 4.3: a server is first of one chain, or of several, and holds copies of those of `replicas` others.
    """

    chains: tuple[Chain, ...]
    hosts: Mapping[int, str]
    """Of each server, also of the dead."""
    replicas: int
    dead: tuple[int, ...] = ()
    has_grown: bool = False
    """Servers have joined those of the start."""
    set_aside: frozenset[tuple[int, int]] = frozenset()
    """Key ranges, each with a server that stays to it what it is, since moves have failed: one that serves it goes on
    doing so, one that has no copy of it gets none. All are tried again once servers have died or joined."""

    @classmethod
    def first(cls, hosts: Sequence[str], *, replicas: int, epoch: int, num_ranges: int | None = None) -> "Chains":
        """Servers on these hosts. Those next to each other on the ring are on different ones, as far as that can be.

        Args:
            num_ranges: key ranges, dealt out one by one; none: one a server.
        """
        size = Counter(hosts)
        by_host = sorted(range(len(hosts)), key=lambda server: (-size[hosts[server]], hosts[server], server))
        # Every other place is filled first, with the servers of the largest hosts, then those between.
        ring = [0] * len(hosts)
        ring[::2], ring[1::2] = by_host[: (len(hosts) + 1) // 2], by_host[(len(hosts) + 1) // 2 :]
        follows = {server: [*ring[place:], *ring[:place]][: replicas + 1] for place, server in enumerate(ring)}
        count = len(hosts) if num_ranges is None else num_ranges
        chains = tuple(Chain(index, tuple(follows[index % len(hosts)]), epoch) for index in range(count))
        return cls(chains, dict(enumerate(hosts)), replicas)

    @property
    def living(self) -> frozenset[int]:
        return frozenset(self.hosts.keys() - {*self.dead})

    @property
    def is_of_the_start(self) -> bool:
        """Whether nobody has died or joined."""
        return not (self.dead or self.has_grown)

    def joined(self, server: int, host: str) -> "Chains":
        """A new server is there. It holds nothing yet."""
        return replace(self, hosts={**self.hosts, server: host}, has_grown=True, set_aside=frozenset())

    def died(self, server: int) -> tuple["Chains", list[Chain]]:
        """The chains without this server, and those of them that have changed. One that is empty now is lost."""
        chains = tuple(chain.without(server) for chain in self.chains)
        changed = [new for old, new in zip(self.chains, chains, strict=True) if new != old]
        return replace(self, chains=chains, dead=(*self.dead, server), set_aside=frozenset()), changed

    def without_move(self, key_range: int, server: int) -> "Chains":
        """This server stays to the key range what it is: a move has failed."""
        return replace(self, set_aside=self.set_aside | {(key_range, server)})

    def may_come(self, chain: Chain) -> frozenset[int]:
        """Servers that may be given a copy of this key range."""
        others = self.living - {*chain.servers}
        return frozenset(server for server in others if (chain.key_range, server) not in self.set_aside)

    def may_hand_over(self, chain: Chain) -> bool:
        """Whether another server may come to serve this key range while its head lives."""
        return chain.is_at_rest and (chain.key_range, chain.head) not in self.set_aside

    def changed(self, chain: Chain) -> "Chains":
        """With this chain of its key range, as the next version of it."""
        chain = replace(chain, version=self.chains[chain.key_range].version + 1)
        return replace(self, chains=tuple(chain if each.key_range == chain.key_range else each for each in self.chains))

    @property
    def num_copies(self) -> Counter[int]:
        """Key ranges of which each server has a copy, or is to have one."""
        return Counter(
            server for chain in self.chains for server in (*chain.servers, chain.newcomer) if server is not None
        )

    @property
    def num_served(self) -> Counter[int]:
        """Key ranges that each server serves."""
        return Counter(chain.head for chain in self.chains if chain.servers)

    def lacking(self) -> Iterator[Chain]:
        """Chains that are shorter than at the start, with a living server for each that is to get a copy: one on
        another host than the others, if there is such a one, and of these one that has few copies."""
        count = self.num_copies
        for chain in self.chains:
            there = {self.hosts[server] for server in chain.servers}
            left = self.may_come(chain)
            if left and chain.is_at_rest and len(chain.servers) <= self.replicas:
                newcomer = min(left, key=lambda server: (self.hosts[server] in there, count[server], server))
                count[newcomer] += 1
                yield replace(chain, newcomer=newcomer)


def to_body(chain: Chain) -> dict[str, object]:
    """A message's body that says it."""
    return {
        "key_range": chain.key_range,
        "servers": list(chain.servers),
        "epoch": chain.epoch,
        "newcomer": chain.newcomer,
        "handover": None if chain.handover is None else list(chain.handover),
        "version": chain.version,
    }


def from_body(body: Mapping[str, Any]) -> Chain:
    """Raises ValueError if this is nothing that `to_body` gives."""
    key_range, servers, epoch = body.get("key_range"), body.get("servers"), body.get("epoch")
    newcomer, handover, version = body.get("newcomer"), body.get("handover"), body.get("version")
    numbers = (key_range, epoch, version, 0 if newcomer is None else newcomer)
    if not (_are_numbers(numbers) and _are_numbers(servers) and (handover is None or _are_numbers(handover, 2))):
        raise ValueError(f"refused {body!r} as a chain of servers")
    left = None if handover is None else Handover(*handover)
    return Chain(key_range, tuple(servers), epoch, newcomer, left, version)  # type: ignore[arg-type]


def _are_numbers(values: object, count: int | None = None) -> bool:
    return (
        isinstance(values, list | tuple) and all(type(each) is int for each in values) and count in (None, len(values))
    )
