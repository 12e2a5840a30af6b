"""The world of a run, as its members are told it: who they are, where, and what they train under."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.comm.connecting import Site
from paceline.comm.servers.line import BellAddress
from paceline.comm.servers.sockets import ServerAddress
from paceline.comm.shared_memory.block import BlockAddress
from paceline.config import RunConfig
from paceline.membership import Membership
from paceline.server.chains import Chain, Chains
from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker tells of itself before the world is known."""

    pid: int
    node_id: str
    address: str
    memory: BlockAddress
    gpus: tuple[str, ...]
    """Identities of the GPUs that the worker sees; none in a run on CPUs."""
    num_cores: int


@dataclass(frozen=True)
class ServerInfo:
    """What a server tells of itself."""

    pid: int
    node_id: str
    endpoint: str
    bell: BellAddress


def joined_to_body(joined: Mapping[int, ServerInfo]) -> dict[str, Any]:
    """What says in a message's body which servers have joined those of the start, and where they are."""
    return {"joined": [[server, asdict(info)] for server, info in joined.items()]}


def joined_of(body: Mapping[str, Any]) -> dict[int, ServerInfo]:
    """Read what `joined_to_body` gives."""
    return {server: ServerInfo(**{**info, "bell": BellAddress(**info["bell"])}) for server, info in body["joined"]}


@dataclass(frozen=True)
class Newcomer:
    """A worker that comes while others train."""

    rank: int
    num_threads: int
    num_first: int
    """The workers that were there before anybody joined."""
    in_pieces: bool
    """Servers hold their ranges in pieces."""


@dataclass(frozen=True)
class WorldSpec:
    """The whole world, as every worker is told it. Ranks run host by host."""

    epoch: int
    workers: tuple[WorkerInfo, ...]
    servers: tuple[ServerInfo, ...]
    strategy: Strategy
    config: RunConfig
    is_resumed: bool
    num_at_start: int
    """Workers that the run began with, where it was resumed with others."""
    newcomer: Newcomer | None = None
    """The only worker of this world, until it has joined the others."""
    chains_now: Chains | None = None
    """Where it comes when servers may have died already."""
    joined: Mapping[int, ServerInfo] = field(default_factory=dict)
    """Servers that have joined those of the start since, by number."""

    @property
    def membership(self) -> Membership:
        ranks = tuple(range(self.size)) if self.newcomer is None else (self.newcomer.rank,)
        return Membership(self.epoch, ranks)

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def num_first(self) -> int:
        """The workers that were there before anybody joined."""
        return self.size if self.newcomer is None else self.newcomer.num_first

    @property
    def num_hosts(self) -> int:
        return len({worker.node_id for worker in self.workers})

    @property
    def is_apart(self) -> bool:
        """Some server is on another host than some worker."""
        return len({*(each.node_id for each in self.workers), *(each.node_id for each in self.servers)}) > 1

    def num_threads(self, rank: int) -> int:
        """A worker computes with its share of its host's cores.

        Servers are not counted: under bsp they compute while workers wait, else they take what their updates need.
        """
        worker = self.workers[rank]
        return max(1, worker.num_cores // len(self.ranks_on(worker.node_id)))

    @property
    def chains(self) -> Chains | None:
        """Who holds which key range, if servers have replicas."""
        if self.chains_now is not None:
            return self.chains_now
        traits, hosts = self.strategy.traits, [server.node_id for server in self.servers]
        if not traits.num_replicas:
            return None
        return Chains.first(hosts, replicas=traits.num_replicas, epoch=self.epoch, num_ranges=traits.num_ranges)

    def server_addresses(self, *, node_id: str) -> list[ServerAddress]:
        """The servers that serve the key ranges, in the order of these, at addresses that members on that node
        reach."""
        if self.chains is not None:
            return [self.address_of(chain, node_id=node_id) for chain in self.chains.chains]
        return [self._address(info, node_id=node_id) for info in self.servers]

    def address_of(self, chain: Chain, *, node_id: str) -> ServerAddress:
        """The address of the server that serves this chain's key range."""
        address = self._address(self.joined.get(chain.head) or self.servers[chain.head], node_id=node_id)
        return replace(address, epoch=chain.epoch, copy_of=chain.key_range if chain.head != chain.key_range else None)

    def _address(self, info: ServerInfo, *, node_id: str) -> ServerAddress:
        return ServerAddress(info.endpoint, info.bell if info.node_id == node_id else None, self.epoch)

    def ranks_on(self, node_id: str) -> list[int]:
        return [rank for rank, worker in enumerate(self.workers) if worker.node_id == node_id]

    def local_rank(self, rank: int) -> int:
        return self.ranks_on(self.workers[rank].node_id).index(rank)

    def gpu_index(self, rank: int) -> int | None:
        """Which of the GPUs that a worker sees is its own.

        Ray shows a worker those that it was given, or all of them where it was given a share of each.
        """
        num_gpus = len(self.workers[rank].gpus)
        return self.local_rank(rank) % num_gpus if num_gpus else None

    @property
    def members(self) -> list[Site]:
        members = []
        for rank, worker in enumerate(self.workers):
            index = self.gpu_index(rank)
            gpu = None if index is None else worker.gpus[index]
            members.append(Site(worker.node_id, gpu, worker.memory))
        return members
