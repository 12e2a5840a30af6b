"""Copies of key ranges: servers die after any message, and nothing that was acknowledged is lost or done twice."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paceline
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.messages import Kind, Message
from paceline.server.actions import Send
from paceline.server.chains import Chain, Chains, from_body
from paceline.server.replication import ToServer
from paceline.server.spec import OptimizerSpec
from paceline.strategies.parameter_server import ParameterServer
from tests.covering import in_turns
from tests.unit.replicated_servers import (
    DEATHS,
    EPOCH,
    FOREVER,
    HOSTS,
    LAYOUT,
    NUM_STEPS,
    PLACES,
    PLAIN,
    SEEDS,
    TWO_DEATHS,
    Death,
    Net,
    Restored,
)

ADAM = OptimizerSpec(torch.optim.Adam, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
QUICK = settings(max_examples=20, deadline=None)


def make_net(
    rule: str, *, hosts: str, deaths: Iterable[Death], seed: int, spec: OptimizerSpec, replicas: int = 1
) -> Net:
    return Net(rule, num_workers=3, hosts=HOSTS[hosts], replicas=replicas, spec=spec, deaths=deaths, seed=seed)


@functools.cache
def undisturbed() -> list[list[Tensor]]:
    """What the heads have after a synchronous run in which nobody dies."""
    net = make_net("bsp", hosts="one host", deaths=[], seed=0, spec=ADAM)
    net.train(NUM_STEPS, is_exact=False)
    return net.heads_parameters()


def assert_bsp_is_undisturbed(hosts: str, deaths: Sequence[Death], seed: int, *, replicas: int) -> None:
    net = make_net("bsp", hosts=hosts, deaths=deaths, seed=seed, spec=ADAM, replicas=replicas)
    net.train(NUM_STEPS, is_exact=False)
    for own, expected in zip(net.heads_parameters(), undisturbed(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    net.assert_copies_are_equal()


def assert_each_gradient_counts_once(
    rule: str, hosts: str, deaths: Sequence[Death], seed: int, *, replicas: int
) -> None:
    """Each is a power of two of its own, so that their sum tells how often each is part of it."""
    net = make_net(rule, hosts=hosts, deaths=deaths, seed=seed, spec=PLAIN, replicas=replicas)
    net.train(NUM_STEPS, is_exact=True)
    net.assert_each_gradient_counted()
    net.assert_copies_are_equal()


@QUICK
@given(death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_bsp_with_a_death_is_the_undisturbed_run(death: Death, hosts: str, seed: int) -> None:
    assert_bsp_is_undisturbed(hosts, [death], seed, replicas=1)


@QUICK
@given(rule=st.sampled_from(["asp", "ssp"]), death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_every_gradient_counts_once_whoever_dies(rule: str, death: Death, hosts: str, seed: int) -> None:
    assert_each_gradient_counts_once(rule, hosts, [death], seed, replicas=1)


@QUICK
@given(deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS)
def test_two_replicas_outlive_two_deaths(deaths: list[Death], hosts: str, seed: int) -> None:
    assert_bsp_is_undisturbed(hosts, deaths, seed, replicas=2)


FOUR_HOSTS = {"one host": ["a"] * 4, "four hosts": ["a", "b", "c", "d"], "two hosts": ["a", "a", "b", "b"]}
THREE_DEATHS = st.lists(
    st.builds(Death, st.integers(0, 3), st.integers(1, 80), st.integers(0, 3)),
    min_size=1,
    max_size=3,
    unique_by=lambda death: death.server,
)


def restored(rule: str, *, hosts: str, deaths: Iterable[Death], seed: int, spec: OptimizerSpec) -> Restored:
    return Restored(rule, num_workers=3, hosts=FOUR_HOSTS[hosts], replicas=1, spec=spec, deaths=deaths, seed=seed)


@functools.cache
def undisturbed_on_four() -> list[list[Tensor]]:
    net = restored("bsp", hosts="one host", deaths=[], seed=0, spec=ADAM)
    net.train(2 * NUM_STEPS, is_exact=False)
    return net.heads_parameters()


@QUICK
@given(deaths=THREE_DEATHS, hosts=st.sampled_from(sorted(FOUR_HOSTS)), seed=SEEDS)
def test_copies_are_made_anew(deaths: list[Death], hosts: str, seed: int) -> None:
    """One copy more than the head's outlives deaths one after another; the model stays that of the undisturbed run."""
    net = restored("bsp", hosts=hosts, deaths=deaths, seed=seed, spec=ADAM)
    net.train(2 * NUM_STEPS, is_exact=False)
    for own, expected in zip(net.heads_parameters(), undisturbed_on_four(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    net.assert_copies_are_equal()
    net.assert_none_is_lacking()


@QUICK
@given(rule=st.sampled_from(["asp", "ssp"]), deaths=THREE_DEATHS, hosts=st.sampled_from(sorted(FOUR_HOSTS)), seed=SEEDS)
def test_every_gradient_counts_once_where_copies_are_made_anew(
    rule: str, deaths: list[Death], hosts: str, seed: int
) -> None:
    net = restored(rule, hosts=hosts, deaths=deaths, seed=seed, spec=PLAIN)
    net.train(NUM_STEPS, is_exact=True)
    net.assert_each_gradient_counted()
    net.assert_copies_are_equal()
    net.assert_none_is_lacking()


def test_a_newcomer_that_has_its_copy_already_is_told_that_it_gets_one() -> None:
    """The launcher's word comes after the copy: the newcomer does not take itself for who is to get one from it."""
    net = restored("bsp", hosts="one host", deaths=[], seed=0, spec=PLAIN)
    net.kill(Death(1, 0, 0))
    net.run()
    net.assert_none_is_lacking()
    chain = next(chain for chain in net.chains.chains if chain.key_range == 1)
    first, newcomer = chain.servers
    _, copy = net.copies[newcomer, 1]
    told = list(copy.reform(replace(chain, servers=(first,), newcomer=newcomer)))
    assert {action.to for action in told if isinstance(action, ToServer)} == {first}


@pytest.mark.parametrize(("victim", "hosts"), in_turns(sorted(HOSTS), (0, 1, 2)))
def test_a_death_after_any_message(hosts: str, victim: int) -> None:
    for num_sent in range(1, 60):
        for num_lost in (0, 2):
            death = Death(victim, num_sent, num_lost)
            assert_bsp_is_undisturbed(hosts, [death], num_sent, replicas=1)
            assert_each_gradient_counts_once("asp", hosts, [death], num_sent, replicas=1)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(rule=st.sampled_from(["asp", "ssp"]), deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS)
def test_two_replicas_count_every_gradient_once(rule: str, deaths: list[Death], hosts: str, seed: int) -> None:
    assert_each_gradient_counts_once(rule, hosts, deaths, seed, replicas=2)


def test_a_state_that_was_loaded_outlives_its_server() -> None:
    net = make_net("bsp", hosts="three hosts", deaths=[], seed=0, spec=ADAM)
    state = {f"{index}.exp_avg": torch.rand(slot.shape, dtype=slot.dtype) for index, slot in enumerate(LAYOUT.specs)}
    state |= {name.replace("avg", "avg_sq"): torch.ones_like(tensor) for name, tensor in state.items()}
    net.ask(0, net.clients[0].set_state(state | {f"{index}.step": torch.tensor(3.0) for index in (0, 1)}))
    net.run()
    net.clients[0].require_done()
    net.kill(Death(1, 0, 0))
    net.ask(0, net.clients[0].get_state())
    net.run()
    loaded = net.clients[0].state()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    net.train(NUM_STEPS, is_exact=False)


def test_only_the_head_serves_and_nothing_of_an_epoch_before_is_taken() -> None:
    net = make_net("bsp", hosts="one host", deaths=[], seed=0, spec=PLAIN, replicas=2)
    (_, head), (_, tail) = net.copies[1, 0], net.copies[2, 0]
    for copy in (head, tail):
        list(copy.reform(Chain(0, (1, 2), EPOCH + 1)))
    stale, unknown = (Message(Kind.REPLICATE, epoch, sender=0, clock=FOREVER) for epoch in (EPOCH, EPOCH + 1))
    assert list(tail.receive(stale, 0.0)) == []
    assert list(tail.receive(unknown, 0.0)) == []
    assert list(head.receive(unknown, 0.0)) == []
    (refused,) = tail.receive(Message(Kind.PULL, EPOCH + 1, sender=0), 0.0)
    assert isinstance(refused, Send)
    assert "it only has a copy" in refused.message.body["error"]


def test_servers_of_a_chain_are_on_different_hosts() -> None:
    chains = Chains.first(["a", "a", "b", "b"], replicas=1, epoch=EPOCH).chains
    assert [chain.servers for chain in chains] == [(0, 2), (1, 3), (2, 1), (3, 0)]
    assert sorted(chain.servers[1] for chain in chains) == [0, 1, 2, 3]
    for hosts in (["a", "b", "c", "a"], ["a", "a", "b", "c"], ["a", "b", "a", "b", "c", "a"]):
        for chain in Chains.first(hosts, replicas=1, epoch=EPOCH).chains:
            assert hosts[chain.servers[0]] != hosts[chain.servers[1]]


def test_whoever_comes_next_serves_and_the_epoch_tells_so() -> None:
    chains = Chains.first(["a"] * 3, replicas=1, epoch=EPOCH)
    left, changed = chains.died(1)
    assert changed == [Chain(1, (0,), EPOCH + 1), Chain(2, (2,), EPOCH)]
    lost, changed = left.died(0)
    assert [chain.key_range for chain in changed if not chain.servers] == [1]
    assert lost.dead == (1, 0)


@pytest.mark.parametrize(
    ("consistency", "options", "found"),
    [
        ("bsp", {"backup_workers": 1}, "backup_workers"),
        ("asp", {"torn_reads": True}, "torn_reads"),
        ("ssp", {"servers": 1}, "servers=1"),
    ],
)
def test_what_copies_would_not_have_is_refused(consistency: Any, options: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        ParameterServer(consistency=consistency, **{"servers": 2, "replicas": 1, **options})


def test_a_second_optimizer_and_simulated_time_are_refused(tmp_path: Path) -> None:
    strategy = ParameterServer(servers=2, replicas=1)
    with pytest.raises(UsageError, match="one optimizer so far"):
        strategy.admission_rule_beside(Membership.first(2))
    with pytest.raises(UsageError, match="the virtual engine would call what replicas take free"):
        paceline.run(list, strategy=strategy, workers=2, engine="virtual", cluster="lab-1gbe", out=tmp_path / "out")


@pytest.mark.parametrize("body", [{}, {"key_range": 0, "servers": 3, "epoch": 1}, {"key_range": 0, "servers": [True]}])
def test_what_is_no_chain_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="refused"):
        from_body(body)
