"""The pieces that know nothing of one another: topology, schedule, codec, correction, transform."""

from __future__ import annotations

import math
from dataclasses import dataclass

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.aggregate import Contribution
from paceline.correction import Proximal, correct
from paceline.schedule import Every
from paceline.topology import Everybody, Graph, Ring, Topology
from paceline.transform import ClipNorm, Transform, inward, outward

# --- topology --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "size", "norm"),
    [
        (Ring(), 8, 0.8047),
        (Ring(), 16, 0.9493),
        (Ring(), 32, 0.9872),
        (Graph(networkx.star_graph(7)), 8, 0.875),
        (Graph(networkx.star_graph(15)), 16, 0.9375),
        (Graph(networkx.path_graph(8)), 8, 0.9493),
        (Graph(networkx.path_graph(32)), 32, 0.9968),
        (Everybody(), 8, 0.0),
    ],
    ids=["ring-8", "ring-16", "ring-32", "star-8", "star-16", "chain-8", "chain-32", "everybody"],
)
def test_contraction_is_the_published_one(topology: Topology, size: int, norm: float) -> None:
    assert topology.contraction(size) == pytest.approx(norm, abs=5e-5)
    assert topology.spectral_gap(size) == pytest.approx(1 - norm, abs=5e-5)


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


def test_a_graph_of_other_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="workers 0 to 3"):
        Graph(networkx.path_graph(3)).neighbours(0, 0, 4)


# --- schedule and codec ----------------------------------------------------------------------------------------------


@given(period=st.integers(1, 20), num_steps=st.integers(0, 100))
def test_a_period_is_due_once_in_it(period: int, num_steps: int) -> None:
    assert sum(bool(Every(period).due(step)) for step in range(1, num_steps + 1)) == num_steps // period


def test_a_period_is_at_least_one_step() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Every(0)


# --- correction and transform ----------------------------------------------------------------------------------------


def test_the_proximal_term_is_the_gradient_of_its_penalty() -> None:
    parameter, anchor = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([0.5, 1.0])
    (0.3 / 2 * (parameter - anchor).square().sum()).backward()
    assert parameter.grad is not None
    expected, without = parameter.grad.clone(), torch.zeros(2, requires_grad=True)
    parameter.grad.zero_()
    correct(Proximal(0.3), [parameter, without], [anchor, anchor])
    torch.testing.assert_close(parameter.grad, expected)
    assert without.grad is None


@dataclass(frozen=True)
class Scale(Transform):
    factor: float

    def outward(self, contribution: Contribution) -> Contribution:
        return contribution._replace(tensors=[tensor * self.factor for tensor in contribution.tensors])

    def inward(self, joined: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        return [tensor / self.factor for tensor in joined]


def test_transforms_nest() -> None:
    """The innermost acts first on the way out, and last on the way in."""
    contribution = Contribution(0, 1.0, "gradient", [torch.tensor([3.0, 4.0])])
    layers = [ClipNorm(1.0), Scale(10.0)]
    sent = outward(layers, contribution)
    torch.testing.assert_close(sent.tensors[0], torch.tensor([6.0, 8.0]))
    torch.testing.assert_close(inward(layers, sent.tensors)[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(contribution.tensors[0], torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_contribution_that_is_not_finite_is_left_to_those_who_refuse_it(poison: float) -> None:
    contribution = Contribution(0, 1.0, "delta", [torch.tensor([1.0]), torch.tensor([poison])])
    assert ClipNorm(1.0).outward(contribution) is contribution


def test_what_is_short_enough_leaves_as_it_is() -> None:
    contribution = Contribution(0, 1.0, "delta", [torch.tensor([0.6]), torch.tensor([0.8])])
    assert ClipNorm(1.01).outward(contribution) is contribution
