"""What requests to servers take on the virtual engine, and how those about rows vary."""

from __future__ import annotations

import statistics
from dataclasses import replace
from random import Random

import pytest

from paceline.cluster.description import Cluster, Communication, Compute, Hosts, Servers
from paceline.engines.virtual.computing.requests import RequestCost, RequestCosts, of_servers, of_workers

CLUSTER = Cluster(
    hosts=(Hosts(bandwidth_gbit_per_s=1.0),),
    compute=Compute(step_s=1.0),
    servers=Servers(request_us=10.0),
    communication=Communication(request_us=20.0, request_core_us=6.0),
)


def both_us(costs: RequestCosts, *, about_rows: bool) -> tuple[float, float]:
    """A request's whole time, and that of the core."""
    cost = costs.next(about_rows=about_rows)
    return round(cost.duration_s * 1e6, 6), round(cost.core_s * 1e6, 6)


def test_requests_about_rows_cost_what_others_do_unless_the_cluster_says_more() -> None:
    for about_rows in (False, True):
        assert both_us(of_workers(CLUSTER, Random(0)), about_rows=about_rows) == (20.0, 3.0)
        assert both_us(of_servers(CLUSTER, Random(0)), about_rows=about_rows) == (10.0, 3.0)
    said = replace(
        CLUSTER,
        servers=replace(CLUSTER.servers, row_request_us=100.0),
        communication=replace(CLUSTER.communication, row_request_us=0.0, row_request_core_us=80.0),
    )
    workers, servers = of_workers(said, Random(0)), of_servers(said, Random(0))
    assert both_us(workers, about_rows=True) == (0.0, 40.0)
    assert both_us(servers, about_rows=True) == (100.0, 40.0)
    assert both_us(workers, about_rows=False) == (20.0, 3.0)
    assert both_us(servers, about_rows=False) == (10.0, 3.0)


def test_a_request_beside_needs_half_the_core() -> None:
    cost = RequestCost(1.0, 0.5)
    assert cost.of_core_s(is_beside=False) == 0.5
    assert cost.of_core_s(is_beside=True) == 0.25


def test_requests_about_rows_vary_around_their_mean() -> None:
    costs = RequestCosts(RequestCost(1.0, 0.5), RequestCost(2.0, 1.0), variation=0.5, random=Random(3))
    drawn = [costs.next(about_rows=True) for _ in range(20_000)]
    assert statistics.fmean(cost.duration_s for cost in drawn) == pytest.approx(2.0, rel=0.02)
    assert statistics.pstdev(cost.duration_s for cost in drawn) == pytest.approx(1.0, rel=0.05)
    assert all(cost.core_s == pytest.approx(cost.duration_s / 2) for cost in drawn)
    assert costs.next(about_rows=False) == RequestCost(1.0, 0.5)


def test_a_request_about_rows_is_cold_at_the_first_of_its_servers_alone() -> None:
    costs = RequestCosts(RequestCost(1.0, 0.5), RequestCost(9.0, 4.0))
    about_rows, plain = costs.next(about_rows=True), costs.next(about_rows=False)
    assert costs.core_s(about_rows, [False]) == 4.0
    assert costs.core_s(about_rows, [True, False, False]) == 0.25 + 4.0 + 0.5
    assert costs.core_s(about_rows, [True, True]) == 2.0 + 0.25
    assert costs.core_s(plain, [True, False]) == 0.25 + 0.5
