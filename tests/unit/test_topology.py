"""Topologies against closed forms: neighbours, weights, contraction, and the exact mean where one is promised."""

from __future__ import annotations

import bz2
import gzip
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import UsageError
from paceline.topology import (
    BaseK,
    Chain,
    EdgeList,
    Everybody,
    Exponential,
    Graph,
    Hypercube,
    Matcha,
    OnePeerExponential,
    RandomPairs,
    Ring,
    Star,
    Topology,
    Torus,
    Tree,
)
from paceline.topology.changing import matchings
from paceline.topology.fixed import Undirected

SIZES = (8, 16, 32)
PUBLISHED = {
    Ring(): (0.8047, 0.9493, 0.9872),
    Exponential(): (0.5, 0.6, 0.6667),
    Torus(): (0.5, 0.6, 0.8828),
    Star(): (0.875, 0.9375, 0.9688),
    Chain(): (0.9493, 0.9872, 0.9968),
    Hypercube(): (0.5, 0.6, 0.6667),
    Everybody(): (0.0, 0.0, 0.0),
}
ANY_SIZE = (Ring(), Chain(), Star(), Tree(), Tree(3), Torus(), Exponential(), Everybody(), OnePeerExponential())
DRAWN = (RandomPairs(), RandomPairs(seed=3), Matcha(), Matcha(of=Torus(), budget=0.3), BaseK(), BaseK(2))


def product(topology: Topology, size: int) -> Tensor:
    """A period's mixing matrices, from the first on."""
    total = torch.eye(size, dtype=torch.float64)
    for step in range(topology.period(size)):
        total = topology.matrix(step, size) @ total
    return total


@pytest.mark.parametrize("topology", PUBLISHED, ids=repr)
def test_contraction_is_the_published_one(topology: Topology) -> None:
    for size, norm in zip(SIZES, PUBLISHED[topology], strict=True):
        assert topology.contraction(size) == pytest.approx(norm, abs=5e-5)
        assert topology.spectral_gap(size) == pytest.approx(1 - norm, abs=5e-5)


@pytest.mark.parametrize("topology", [*ANY_SIZE, *DRAWN], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
def test_mixing_keeps_the_mean(topology: Topology, size: int) -> None:
    """Weights are not negative, and rows and columns sum to one."""
    for step in range(min(topology.period(size), 8)):
        matrix = topology.matrix(step, size)
        ones = torch.ones(size, dtype=torch.float64)
        torch.testing.assert_close(matrix.sum(0), ones)
        torch.testing.assert_close(matrix.sum(1), ones)
        assert float(matrix.min()) > -1e-15
        for rank in range(size):
            near = topology.neighbours(step, rank, size)
            assert rank not in near.receives_from
            assert all(topology.neighbours(step, other, size).receives_from[rank] for other in near.sends_to)


@pytest.mark.parametrize("topology", [each for each in DRAWN if not isinstance(each, BaseK)], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 12, 33])
def test_weights_of_draws_are_the_same_both_ways(topology: Topology, size: int) -> None:
    assert topology.is_symmetric
    matrices = [topology.matrix(step, size) for step in range(topology.period(size))]
    assert all(bool(torch.equal(matrix, matrix.T)) for matrix in matrices)
    assert all(bool((matrix.diagonal() > 0).all()) for matrix in matrices)


@dataclass(frozen=True)
class OneWay(Undirected):
    """Says of itself that links go both ways, and half of them do not."""

    def near(self, rank: int, size: int) -> Collection[int]:
        return [(rank + 1) % size, (rank - 1) % size][: 1 + rank % 2]


def test_a_topology_that_is_wrong_of_its_links_is_noticed() -> None:
    assert not OneWay().keeps_mean(8)


@pytest.mark.parametrize("topology", [*ANY_SIZE, *DRAWN, Matcha(budget=0.02)], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 12, 33])
def test_all_are_joined_where_the_links_of_a_period_join_them(topology: Topology, size: int) -> None:
    links = sum(topology.matrix(step, size) for step in range(topology.period(size)))
    graph = networkx.from_numpy_array(links.numpy(), create_using=networkx.DiGraph)
    assert topology.joins_all(size) == networkx.is_strongly_connected(graph)


def test_many_sizes_are_looked_at_without_all_their_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--elastic 2:128`: 64 draws of each size would be half a million questions."""
    asked = []
    sources = RandomPairs.sources

    def counted(topology: RandomPairs, step: int, rank: int, size: int) -> Mapping[int, float]:
        asked.append(step)
        return sources(topology, step, rank, size)

    monkeypatch.setattr(RandomPairs, "sources", counted)
    topology = RandomPairs(seed=71)
    assert all(topology.keeps_mean(size) and topology.joins_all(size) for size in range(2, 129))
    assert len(asked) <= 16 * sum(range(2, 129))


@pytest.mark.parametrize("size", [4, 8, 16])
def test_one_peer_takes_all_to_the_mean_in_a_period(size: int) -> None:
    topology = OnePeerExponential()
    assert topology.period(size) == size.bit_length() - 1
    assert float((product(topology, size) - 1 / size).abs().max()) < 1e-12


@pytest.mark.parametrize("size", range(1, 40))
def test_one_peer_moves_one_model_at_any_size(size: int) -> None:
    assert OnePeerExponential().num_sent(size) == ((1.0, 1) if size > 1 else (0.0, 0))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("size", range(1, 33))
def test_base_k_takes_all_to_the_mean_with_at_most_k_neighbours(k: int, size: int) -> None:
    topology = BaseK(k)
    assert float((product(topology, size) - 1 / size).abs().max()) < 1e-12
    assert topology.num_sent(size)[1] <= k


def test_base_2_takes_as_many_steps_as_its_paper_says() -> None:
    steps = {3: 3, 5: 5, 6: 4, 7: 5, 12: 5, 16: 4, 25: 9}
    assert {size: BaseK().period(size) for size in steps} == steps


def test_random_pairs_are_drawn_anew_and_repeat() -> None:
    topology = RandomPairs(num_draws=5)
    pairs = [tuple(topology.neighbours(step, 0, 8).sends_to) for step in range(10)]
    assert pairs[:5] == pairs[5:]
    assert len(set(pairs)) > 1
    assert topology.num_sent(8) == (1.0, 1)
    alone = [rank for rank in range(7) if not topology.neighbours(0, rank, 7).sends_to]
    assert len(alone) == 1


@pytest.mark.parametrize("of", [Ring(), Torus(), Star(), Exponential(), Everybody()], ids=repr)
def test_matchings_divide_the_links(of: Topology) -> None:
    found = matchings(of, 12)
    links = {frozenset((a, b)) for a in range(12) for b in of.neighbours(0, a, 12).receives_from}
    divided = [frozenset(pair) for pairs in found for pair in pairs.items()]
    assert sorted(map(sorted, divided)) == sorted([*map(sorted, links)] * 2)  # each once, in both directions
    assert all(pairs[pairs[rank]] == rank for pairs in found for rank in pairs)


def test_matcha_moves_its_budget() -> None:
    full, part = Ring().num_sent(10)[0], Matcha(budget=0.25, num_draws=2000).num_sent(10)[0]
    assert part == pytest.approx(0.25 * full, rel=0.1)


# --- graphs of users --------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 12), edges=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11))))
def test_any_graph_mixes_to_the_mean_of_its_parts(size: int, edges: set[tuple[int, int]]) -> None:
    graph = networkx.empty_graph(size)
    graph.add_edges_from((a, b) for a, b in edges if a < size and b < size)
    matrix = Graph(graph).matrix(0, size)
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix.sum(1), torch.ones(size, dtype=torch.float64))
    assert bool((matrix >= 0).all())
    for rank in range(size):
        near = Graph(graph).neighbours(0, rank, size)
        assert set(near.sends_to) == set(near.receives_from) == {other for other in graph[rank] if other != rank}


@pytest.mark.parametrize(
    ("topology", "graph"),
    [
        (Star(), networkx.star_graph(7)),
        (Chain(), networkx.path_graph(8)),
        (Ring(), networkx.cycle_graph(8)),
        (Torus(2), networkx.convert_node_labels_to_integers(networkx.grid_2d_graph(2, 4, periodic=True))),
        (Tree(), networkx.full_rary_tree(2, 8)),
        (Everybody(), networkx.complete_graph(8)),
    ],
    ids=str,
)
def test_named_topologies_are_the_graphs_of_their_names(topology: Topology, graph: networkx.Graph) -> None:
    torch.testing.assert_close(topology.matrix(0, 8), Graph(graph).matrix(0, 8))


def test_a_graph_may_have_weights_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "links.txt"
    path.write_text("# two ranks and a weight\n0 1 0.25\n1 2 0.5\n2 2 0.1\n")
    expected = torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.25, 0.5], [0.0, 0.5, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(EdgeList(str(path)).matrix(0, 3), expected)


def test_directed_links_go_from_sender_to_receiver(tmp_path: Path) -> None:
    """Each sender shares itself out evenly: columns sum to one."""
    path = tmp_path / "links.txt"
    path.write_text("0 1\n0 2\n1 0\n2 0\n")
    topology = EdgeList(str(path), directed=True)
    expected = torch.tensor([[1 / 3, 0.5, 0.5], [1 / 3, 0.5, 0], [1 / 3, 0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(topology.matrix(0, 3), expected)
    path.unlink()
    assert topology.neighbours(0, 0, 3).sends_to.keys() == {1, 2}  # the file was read once


@pytest.mark.parametrize("content", [None, "0 one\n", "0 1 heavy\n", "0,1\n1,2\n", "0 1\n2\n", "0 1 0.2\n1 0 0.3\n"])
def test_a_file_that_is_no_list_of_links_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "links.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"links\.txt cannot be read as a list of links"):
        EdgeList(str(path))


def test_receivers_are_those_whose_sources_name_the_sender() -> None:
    @dataclass(frozen=True)
    class Onward(Topology):
        def sources(self, step: int, rank: int, size: int) -> dict[int, float]:
            return {rank: 0.5, (rank - step - 1) % size: 0.5}

        def period(self, size: int) -> int:
            return 2

    assert Onward().neighbours(0, 1, 5).sends_to == {2: 0.5}
    assert Onward().neighbours(3, 1, 5).sends_to == {3: 0.5}
    assert dict(Onward().neighbours(2, 1, 5).receives_from) == {0: 0.5}


def weighted(*links: tuple[int, int, float]) -> Graph:
    graph = networkx.Graph()
    graph.add_weighted_edges_from(links)
    return Graph(graph)


@dataclass(frozen=True)
class Swaps(Topology):
    """Workers 0 and 1 swap their models, then 1 and 2, but for what they keep."""

    kept: float = 0.0
    num_steps: int = 2

    def period(self, size: int) -> int:
        return self.num_steps

    def sources(self, step: int, rank: int, size: int) -> dict[int, float]:
        partner = {step % 2: 1 + step % 2, 1 + step % 2: step % 2}.get(rank)
        return {rank: 1.0} if partner is None else {rank: self.kept, partner: 1 - self.kept}


@pytest.mark.parametrize(
    ("topology", "size", "do"),
    [
        (weighted((0, 1, 1.0)), 2, False),
        (weighted(*((rank, (rank + 1) % 4, 0.5) for rank in range(4))), 4, False),
        (weighted(*((rank, (rank + 1) % 5, 0.5) for rank in range(5))), 5, True),
        (weighted((0, 1, 0.5)), 2, True),
        (Ring(), 4, True),
        (RandomPairs(), 7, True),
        (BaseK(), 12, True),
        (OnePeerExponential(), 12, True),
        (Swaps(), 3, False),
        (Swaps(kept=0.1), 3, True),
        (weighted(*((0, leaf, 1 / 3) for leaf in range(1, 5))), 5, True),
        (weighted(*((one, other, 0.3334) for one in range(4) for other in range(one))), 4, True),
        (weighted((0, 1, 1.0), (1, 2, 1.0)), 3, False),
        (weighted((0, 1, -0.5), (1, 2, 0.5)), 3, False),
        (weighted((0, 1, 0.5), (1, 2, 0.0)), 3, False),
        (weighted((0, 1, 1e6), (1, 2, 1e6)), 3, False),
    ],
)
def test_workers_that_swap_their_models_never_agree(topology: Topology, size: int, do: bool) -> None:
    assert topology.keeps_mean(size)
    assert topology.joins_all(size)
    assert topology.comes_together(size) is do


def test_a_long_period_is_taken_on_trust() -> None:
    assert not Swaps(num_steps=1024).comes_together(3)
    assert Swaps(num_steps=1026).comes_together(3)


def test_a_packed_list_of_links_is_unpacked(tmp_path: Path) -> None:
    content = "0 1 # première\n1 2\n".encode()
    for name, packed in (("a.txt", content), ("a.gz", gzip.compress(content)), ("a.bz2", bz2.compress(content))):
        (tmp_path / name).write_bytes(packed)
        torch.testing.assert_close(EdgeList(str(tmp_path / name)).matrix(0, 3), Chain().matrix(0, 3))
    for name in ("a.gz", "a.bz2"):
        for broken in (content, (tmp_path / name).read_bytes()[:-9]):
            (tmp_path / "broken").with_suffix(Path(name).suffix).write_bytes(broken)
            with pytest.raises(UsageError, match="cannot be read as a list of links"):
                EdgeList(str((tmp_path / "broken").with_suffix(Path(name).suffix)))


@pytest.mark.parametrize(
    ("topology", "size", "reason"),
    [
        (Graph(networkx.path_graph(3)), 4, "workers 0 to 3"),
        (Torus(3), 8, "8 workers make no torus of 3 rows"),
        (Hypercube(), 6, "a power of two of workers, not 6"),
        (Graph(networkx.from_edgelist([(0, 1), (1, 2, {"weight": 0.5})])), 3, "some links to worker 1 have a weight"),
        (weighted((0, 1, math.nan)), 2, "from worker 1 to worker 0 has the weight nan"),
        (weighted((0, 1, 0.5), (1, 1, math.inf)), 2, "from worker 1 to worker 1 has the weight inf"),
    ],
)
def test_a_topology_that_is_none_of_so_many_workers_is_refused(topology: Topology, size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        topology.matrix(0, size)


@pytest.mark.parametrize("wrong", [lambda: BaseK(0), lambda: Tree(0), lambda: Matcha(budget=0.0)])
def test_settings_that_mean_nothing_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrong()  # type: ignore[operator]
