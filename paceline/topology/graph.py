"""Topologies that users draw themselves."""

import bz2
import gzip
import math
import zlib
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
            return _finite(rank, own, given)
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

    The file is UTF-8, and unpacked if its name ends in .gz, .gzip or .bz2.

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
            for line in _text(Path(self.file)).splitlines():  # networkx would pass over lines that are no links
                if fields := line.partition("#")[0].split():
                    _add_link(graph, line, fields)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UsageError(f"{self.file} cannot be read as a list of links, two ranks a line: {error}") from None
        return Graph(graph)

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        return self.graph.sources(step, rank, size)


def _finite(rank: int, own: float | None, given: Mapping[int, float]) -> dict[int, float]:
    """A worker's weights. Whether models that are mixed with them come together is asked where they are mixed."""
    for other, weight in {**given, rank: own or 0.0}.items():
        if not math.isfinite(weight):
            raise ValueError(f"the link from worker {other} to worker {rank} has the weight {weight:g}; take 0 to 1")
    return {rank: 1 - sum(given.values()) if own is None else own, **given}


def _text(path: Path) -> str:
    """The file's, as networkx reads it."""
    content = path.read_bytes()
    unpack = {".gz": gzip.decompress, ".gzip": gzip.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
    return unpack(content).decode()


def _add_link(graph: "networkx.Graph[int]", line: str, fields: Sequence[str]) -> None:
    """Raises ValueError for a line that is no link, or one that is there with another weight."""
    if not 2 <= len(fields) <= 3:
        raise ValueError(f"{line!r} is none")
    one, other = int(fields[0]), int(fields[1])
    about = {"weight": float(fields[2])} if len(fields) == 3 else {}
    if graph.has_edge(one, other) and graph.edges[one, other] != about:
        raise ValueError(f"{line!r} gives a link another weight than a line before it")
    graph.add_edge(one, other, **about)
