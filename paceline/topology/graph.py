"""Topologies that users draw themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from paceline.errors import UsageError
from paceline.topology.base import Topology
from paceline.topology.fixed import metropolis_hastings

if TYPE_CHECKING:
    import networkx


@final
@dataclass(frozen=True)
class Graph(Topology):
    """Any graph over the workers' ranks.

    Links have the weights that their attribute `weight` says, and a worker itself that of its link to itself, or the
    rest. Without, the weights of an undirected graph are Metropolis-Hastings'; along directed links, from sender to
    receiver, each sender shares itself out evenly among its receivers and itself, as push-sum does.
    """

    graph: "networkx.Graph[Any]" = field(hash=False)
    """The graph, whose nodes are the ranks, 0 to the number of workers less one."""

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        graph = self.graph
        if graph.number_of_nodes() != size or rank not in graph:
            raise ValueError(f"the graph has the nodes {sorted(graph)}, the run has the workers 0 to {size - 1}")
        near = set(graph.predecessors(rank) if graph.is_directed() else graph[rank]) - {rank}
        given = {other: graph.edges[other, rank].get("weight") for other in sorted(near)}
        if given and None not in given.values():
            own = graph.edges[rank, rank].get("weight") if graph.has_edge(rank, rank) else None
            return {rank: 1 - sum(given.values()) if own is None else own, **given}
        if any(weight is not None for weight in given.values()):
            raise ValueError(f"some links to worker {rank} have a weight, and others have none")
        if graph.is_directed():
            return {other: 1 / (1 + self._num_receivers(other)) for other in sorted({rank, *near})}
        degrees = {other: len(set(graph[other]) - {other}) for other in (rank, *near)}
        return metropolis_hastings(rank, near, degrees)

    def _num_receivers(self, rank: int) -> int:
        return len(set(self.graph[rank]) - {rank})


@final
@dataclass(frozen=True)
class EdgeList(Topology, name="edge-list"):
    """The graph of a file with a link a line: two ranks and, if it is to be another than `Graph` gives, a weight.

    Raises:
        UsageError: the file cannot be read, or is no such list.
    """

    file: str
    directed: bool = False
    """A line's first rank sends to its second; else both ways."""

    def __post_init__(self) -> None:
        _ = self.graph  # read where the strategy is made: other machines may not have the file

    @cached_property
    def graph(self) -> Graph:
        import networkx  # here: it takes a while to load

        kind = networkx.DiGraph if self.directed else networkx.Graph
        try:
            read = networkx.read_edgelist(self.file, create_using=kind, nodetype=int, data=(("weight", float),))
        except (OSError, TypeError, IndexError, ValueError) as error:
            raise UsageError(f"{self.file} cannot be read as a list of links, two ranks a line: {error}") from None
        return Graph(read)

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        return self.graph.sources(step, rank, size)
