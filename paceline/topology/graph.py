"""Topologies that users draw themselves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
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
            return _checked(rank, own, given)
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

        graph: networkx.Graph[int] = networkx.DiGraph() if self.directed else networkx.Graph()
        try:
            for line in Path(self.file).read_text().splitlines():
                if fields := line.partition("#")[0].split():
                    _add_link(graph, line, fields)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.file} cannot be read as a list of links, two ranks a line: {error}") from None
        return Graph(graph)

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        return self.graph.sources(step, rank, size)


def _checked(rank: int, own: float | None, given: Mapping[int, float]) -> dict[int, float]:
    """A worker's weights; a link of weight 0 is none. Raises ValueError for weights with which models run away."""
    for other, weight in given.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"the link from worker {other} to worker {rank} has the weight {weight:g}; take 0 to 1")
    if own is None:
        own = 1 - sum(given.values())
        own = 0.0 if math.isclose(own, 0, abs_tol=1e-9) else own  # up to rounding
    if not 0 <= own < math.inf:
        raise ValueError(
            f"the links to worker {rank} weigh {sum(given.values()):g} together, and its own model {own:g}; make them "
            "weigh at most 1, or leave all weights out"
        )
    return {rank: own, **{other: weight for other, weight in given.items() if weight}}


def _add_link(graph: "networkx.Graph[int]", line: str, fields: Sequence[str]) -> None:
    """Raises ValueError for a line that is no link, or one that is there with another weight."""
    if not 2 <= len(fields) <= 3:
        raise ValueError(f"{line!r} is none")
    one, other = int(fields[0]), int(fields[1])
    about = {"weight": float(fields[2])} if len(fields) == 3 else {}
    if graph.has_edge(one, other) and graph.edges[one, other] != about:
        raise ValueError(f"{line!r} gives a link another weight than a line before it")
    graph.add_edge(one, other, **about)
