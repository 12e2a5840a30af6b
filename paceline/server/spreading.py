"""Where key ranges go once servers have died or joined, so that the load is even again: one move at a time, as a value.

What counts first is that copies of a key range are on different hosts, then that servers have as many copies as each
other, then that they serve as many key ranges. Each move makes the first of these that it changes better, so that moves
come to an end. A key range is not divided: where there are more servers than key ranges, some serve none.

Moves that have been set aside (`Chains.set_aside`) are passed over, and the best of the others is made.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from paceline.server.chains import Chain, Chains


class Of(NamedTuple):
    """One of those that hold a key range."""

    chain: Chain
    server: int


def departure(chains: Chains) -> Of | None:
    """A chain with a copy too many, and who is to let go of its own; where that one serves the key range, another one
    has to do so first."""
    count = chains.num_copies
    for chain in chains.chains:
        if chain.is_at_rest and len(chain.servers) > chains.replicas + 1:
            left = {server: _num_hosts(chains, {*chain.servers} - {server}) for server in _leavers(chains, chain)}
            return Of(chain, max(left, key=lambda server: (left[server], count[server], server)))
    return None


def removal(chains: Chains) -> Chain | None:
    """A chain with a newcomer who is to have somebody's copy; none: copies lie well."""
    count, served = chains.num_copies, chains.num_served

    def gain(chain: Chain, leaver: int, comer: int) -> tuple[int, int]:
        after = {*chain.servers, comer} - {leaver}
        return _num_hosts(chains, after) - _num_hosts(chains, chain.servers), count[leaver] - count[comer] - 1

    moves = [
        (gain(chain, leaver, comer), served[chain.head], replace(chain, newcomer=comer))
        for chain in chains.chains
        if chain.is_at_rest
        for leaver in _leavers(chains, chain)
        for comer in sorted(chains.may_come(chain))
    ]
    better = [move for move in moves if move[0] > (0, 0)]
    return max(better, key=lambda move: move[:2])[2] if better else None


def succession(chains: Chains) -> Of | None:
    """A chain, and who is to serve it; none: servers serve as many key ranges as they can alike.

    Whoever serves two or more key ranges more than another server gives one away, to that one or along a way of
    servers that have copies of each other's. The last step of the shortest way comes first, so that nobody serves more
    meanwhile.
    """
    served = chains.num_served
    for most in sorted(chains.living, key=lambda server: (-served[server], server)):
        reached = [most]
        for server in reached:  # which grows meanwhile
            for chain in chains.chains:
                for other in chain.servers if chain.head == server and chains.may_hand_over(chain) else ():
                    if other not in reached:
                        reached.append(other)
                        if served[other] <= served[most] - 2:
                            return Of(chain, other)
    return None


def _leavers(chains: Chains, chain: Chain) -> tuple[int, ...]:
    """Servers that may let go of their copy of it."""
    return chain.servers if chains.may_hand_over(chain) else chain.servers[1:]


def _num_hosts(chains: Chains, servers: Iterable[int]) -> int:
    return len({chains.hosts[server] for server in servers})
