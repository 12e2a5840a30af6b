"""Servers join while others train and die: they are given copies and serve key ranges, nothing that was acknowledged is
lost, and the load is even again."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import UsageError
from paceline.messages import Kind, Message
from paceline.server.chains import Chain, Chains, Handover, from_body, to_body
from paceline.server.replication import HandedOver, ToServer
from paceline.server.spec import OptimizerSpec, Push
from paceline.server.spreading import departure, removal, succession
from paceline.strategies.parameter_server import ParameterServer
from tests.unit.replicated_servers import (
    EPOCH,
    FOREVER,
    NUM_STEPS,
    PLAIN,
    SEEDS,
    Death,
    Joining,
    Restored,
)
from tests.unit.test_replication import ADAM

QUICK = settings(max_examples=25, deadline=None)
LATER = st.integers(0, 120)
HOSTS = {"one host": ["a", "a"], "two hosts": ["a", "b"], "three hosts": ["a", "b", "c"]}
"""Of the servers of the start, all of which have a copy of each key range."""
PLACES, RULES = st.sampled_from(sorted(HOSTS)), st.sampled_from(["asp", "ssp"])
JOINING = st.lists(st.builds(Joining, LATER, st.sampled_from("abc")), min_size=1, max_size=3).map(
    lambda joining: sorted(joining, key=lambda each: each.after)
)
DEATHS = st.lists(
    st.builds(Death, st.integers(0, 4), st.integers(1, 80), st.integers(0, 3)),
    max_size=3,
    unique_by=lambda death: death.server,
)


def grown(
    rule: str,
    *,
    hosts: str = "one host",
    deaths: Iterable[Death] = (),
    joining: Sequence[Joining] = (),
    seed: int = 0,
    spec: OptimizerSpec = ADAM,
) -> Restored:
    replicas = len(HOSTS[hosts]) - 1
    net = Restored(rule, num_workers=3, hosts=HOSTS[hosts], replicas=replicas, spec=spec, deaths=deaths, seed=seed)
    net.joining = list(joining)
    return net


@functools.cache
def undisturbed(num_servers: int) -> list[list[Tensor]]:
    net = grown("bsp", hosts="three hosts" if num_servers == 3 else "two hosts")
    net.train(2 * NUM_STEPS, is_exact=False)
    return net.heads_parameters()


def assert_is_undisturbed(net: Restored) -> None:
    own = [tensor for tensors in net.heads_parameters() for tensor in tensors]
    expected = [tensor for tensors in undisturbed(len(net.chains.chains)) for tensor in tensors]
    assert all(a.equal(b) for a, b in zip(own, expected, strict=True))
    net.assert_copies_are_equal()
    net.assert_none_is_lacking()


@QUICK
@given(deaths=DEATHS, joining=JOINING, hosts=PLACES, seed=SEEDS)
def test_servers_join_and_die(deaths: list[Death], joining: list[Joining], hosts: str, seed: int) -> None:
    """Servers of which each has copies of all outlive as many deaths, one after another, as others join."""
    net = grown("bsp", hosts=hosts, deaths=deaths, joining=joining, seed=seed)
    net.train(2 * NUM_STEPS, is_exact=False)
    assert_is_undisturbed(net)


@QUICK
@given(
    rule=st.sampled_from(["asp", "ssp"]),
    deaths=DEATHS,
    joining=JOINING,
    hosts=st.sampled_from(sorted(HOSTS)),
    seed=SEEDS,
)
def test_every_gradient_counts_once_where_servers_join(
    rule: str, deaths: list[Death], joining: list[Joining], hosts: str, seed: int
) -> None:
    net = grown(rule, hosts=hosts, deaths=deaths, joining=joining, seed=seed, spec=PLAIN)
    net.train(NUM_STEPS, is_exact=True)
    net.assert_each_gradient_counted()
    net.assert_copies_are_equal()
    net.assert_none_is_lacking()


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(deaths=DEATHS, joining=JOINING, hosts=PLACES, seed=SEEDS)
def test_servers_join_and_die_in_many_orders(
    deaths: list[Death], joining: list[Joining], hosts: str, seed: int
) -> None:
    net = grown("bsp", hosts=hosts, deaths=deaths, joining=joining, seed=seed)
    net.train(2 * NUM_STEPS, is_exact=False)
    assert_is_undisturbed(net)


def test_the_dead_are_replaced_one_after_another() -> None:
    """Both servers of the start die, and those who came for them have the model."""
    net = grown("bsp", deaths=[Death(0, 20, 0), Death(1, 70, 0)], joining=[Joining(30, "a"), Joining(90, "a")])
    net.train(2 * NUM_STEPS, is_exact=False)
    assert net.dead == {0, 1}
    assert_is_undisturbed(net)
    assert sorted(chain.head for chain in net.chains.chains) == [2, 3]


def handing_over() -> tuple[Restored, Chain]:
    """A net in which server 0 is to hand key range 0 over to server 1, and has not heard so yet."""
    net = grown("bsp")
    net.copies_anew = False
    net.hand_over(net.chains.chains[0], to=1)
    return net, net.chains.chains[0]


def test_a_handover_is_called_off_and_nobody_waits_for_ever() -> None:
    """What the head has put off it does then."""
    net, chain = handing_over()
    assert list(net.copies[0, 0][1].reform(chain)) == [HandedOver(chain)]
    net.ways.clear()
    for worker, client in enumerate(net.clients):
        net.ask(worker, client.exchange(Push(pause_at=FOREVER)))
    net.run()
    assert not any(client.is_done for client in net.clients)
    net.tell(replace(chain, handover=None))
    net.run()
    assert all(client.is_done for client in net.clients)
    net.hear_of_copies(0, HandedOver(chain))  # word of it comes late
    assert net.chains.chains[0] == replace(chain, handover=None)


def test_word_of_a_handover_that_was_called_off_is_not_taken_for_word_of_the_next() -> None:
    net, first = handing_over()
    net.tell(replace(first, handover=None))
    net.hand_over(net.chains.chains[0], to=1)
    net.hear_of_copies(0, HandedOver(first))
    assert net.chains.chains[0].head == 0


def test_who_has_stopped_takes_what_the_next_head_says_when_it_has_stepped_back() -> None:
    """The other one was told first, and entries of its come before the launcher's word."""
    net, chain = handing_over()
    list(net.copies[0, 0][1].reform(chain))
    net.ways.clear()
    after = chain.handed_over()
    list(net.copies[1, 0][1].reform(after))
    clock = net.copies[1, 0][1]._number + 1
    entry = Message(Kind.REPLICATE, after.epoch, sender=1, clock=clock, body={"what": "left", "worker": 2})
    net.serve("s1", 0, 0, entry)
    assert 2 in net.copies[0, 0][0].parts[0].shard.rule.active
    net.unserved.add(0)
    net.chains = net.chains.changed(after)
    net.reform(0, net.chains.chains[0])
    assert 2 not in net.copies[0, 0][0].parts[0].shard.rule.active


def test_who_was_last_hands_on_to_who_comes_behind_it_what_came_before_it_had_heard_so() -> None:
    net = grown("bsp", hosts="three hosts")
    chain = net.chains.chains[0]
    head, middle, last = chain.servers
    after = replace(chain, handover=Handover(middle, 1)).handed_over()
    list(net.copies[middle, 0][1].reform(after))
    tail = net.copies[last, 0][1]
    clock = tail._number + 1
    entry = Message(Kind.REPLICATE, after.epoch, sender=middle, clock=clock, body={"what": "left", "worker": 2})
    assert list(tail.receive(entry, 0.0)) == []
    told = list(tail.reform(after))
    handed_on = [each for each in told if isinstance(each, ToServer) and each.message.kind is Kind.REPLICATE]
    assert [(each.to, each.message.clock) for each in handed_on] == [(head, clock)]


def test_a_head_that_hands_over_waits_until_all_copies_have_what_it_has_done() -> None:
    net, chain = handing_over()
    head = net.copies[0, 0][1]
    list(head.receive(Message(Kind.LEAVE, EPOCH, sender=2), 0.0))
    assert not any(isinstance(action, HandedOver) for action in head.reform(chain))
    assert head.has_stopped
    said = Message(Kind.REPLICATED, EPOCH, sender=1, clock=head._number)
    assert list(head.receive(said, 0.0))[-1] == HandedOver(chain)


def begun(net: Restored, chain: Chain) -> list[Message]:
    """What the last of the chain gives the newcomer, for whom all is built."""
    assert chain.newcomer is not None
    net.hosts.append("a")
    net.chains = net.chains.joined(chain.newcomer, "a")
    net.build(chain.newcomer, chain)
    return to_newcomer(net, chain)


def to_newcomer(net: Restored, chain: Chain) -> list[Message]:
    told = net.copies[chain.servers[-1], 0][1].reform(chain)
    return [each.message for each in told if isinstance(each, ToServer) and each.to == chain.newcomer]


def test_a_newcomer_takes_nothing_of_whoever_was_to_give_it_an_earlier_copy() -> None:
    net = grown("bsp")
    chain = replace(net.chains.chains[0], newcomer=2)
    whole = begun(net, chain)
    net.build(2, replace(chain.without(1), newcomer=2))
    copy = net.copies[2, 0][1]
    assert [action for entry in whole for action in copy.receive(entry, 0.0)] == []
    assert copy._is_new


def test_a_newcomer_that_had_heard_of_a_new_head_takes_what_its_giver_had_sent_before() -> None:
    """It is not given that again."""
    net = grown("bsp", hosts="three hosts")
    chain = replace(net.chains.chains[0], newcomer=3)
    whole, copy = begun(net, chain), net.copies[3, 0][1]
    left = chain.without(chain.head)
    list(copy.reform(left))
    assert [action for entry in whole for action in copy.receive(entry, 0.0)]
    assert not copy._is_new
    assert to_newcomer(net, left) == []


def test_a_handover_ends_with_the_death_of_one_of_its_chain() -> None:
    chain = Chain(0, (0, 1, 2), EPOCH, handover=Handover(1, number=1))
    assert chain.without(2) == Chain(0, (0, 1), EPOCH)
    assert chain.without(0) == Chain(0, (1, 2), EPOCH + 1)
    assert chain.without(3) == chain
    assert chain.handed_over() == Chain(0, (1, 2, 0), EPOCH + 1)
    assert from_body(to_body(chain)) == chain
    assert from_body(to_body(replace(chain, version=3))).version == 3


# --- where key ranges go --------------------------------------------------------------------------------------------


def moved(chains: Chains) -> Chains | None:
    """The chains after the next move, which is done at once; none: there is none."""
    lacking = next(chains.lacking(), None)
    leaving = departure(chains)
    if lacking is not None:
        return chains.changed(lacking.extended())
    if leaving is not None and leaving.server != leaving.chain.head:
        return chains.changed(leaving.chain.without(leaving.server))
    comer = None if leaving is not None else removal(chains)
    if comer is not None:
        return chains.changed(comer.extended())
    following = succession(chains) if leaving is None else (leaving.chain, leaving.chain.servers[1])
    if following is None:
        return None
    chain, to = following
    return chains.changed(replace(chain, handover=Handover(to, 1)).handed_over())


def settled(chains: Chains) -> Chains:
    for _ in range(500):
        after = moved(chains)
        if after is None:
            return chains
        assert all(chain.servers for chain in after.chains)
        chains = after
    raise AssertionError("moves do not come to an end")


@settings(max_examples=150, deadline=None)
@given(
    hosts=st.lists(st.sampled_from("abc"), min_size=2, max_size=5),
    replicas=st.integers(1, 2),
    per_server=st.integers(1, 3),
    data=st.data(),
)
def test_moves_end_with_an_even_load(hosts: list[str], replicas: int, per_server: int, data: Any) -> None:
    replicas = min(replicas, len(hosts) - 1)
    chains = Chains.first(hosts, replicas=replicas, epoch=EPOCH, num_ranges=per_server * len(hosts))
    for number in range(len(hosts), len(hosts) + data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            dead = data.draw(st.sampled_from(sorted(chains.living)))
            if all(chain.without(dead).servers for chain in chains.chains):
                chains, _ = chains.died(dead)
        chains = settled(chains.joined(number, data.draw(st.sampled_from("abcd"))))
    num_hosts = len({chains.hosts[server] for server in chains.living})
    for chain in chains.chains:
        assert len(chain.servers) == len({*chain.servers}) == min(replicas + 1, len(chains.living))
        assert len({chains.hosts[server] for server in chain.servers}) == min(len(chain.servers), num_hosts)
    if num_hosts == len(chains.living) or num_hosts == 1:  # else hosts' copies come first
        for count in (chains.num_copies, chains.num_served):
            each = [count[server] for server in chains.living]
            assert max(each) - min(each) <= 1, chains.chains


def test_a_server_that_joins_takes_its_part_of_many_key_ranges() -> None:
    chains = Chains.first(["a", "b"], replicas=1, epoch=EPOCH, num_ranges=6)
    assert [chain.servers for chain in chains.chains] == [(0, 1), (1, 0)] * 3
    chains = settled(chains.joined(2, "c"))
    assert dict(chains.num_served) == dict(chains.num_copies - chains.num_served) == {0: 2, 1: 2, 2: 2}


def test_copies_go_to_a_host_that_has_none_though_servers_then_have_more_than_others() -> None:
    chains = settled(Chains.first(["a", "a"], replicas=1, epoch=EPOCH, num_ranges=4).joined(2, "b"))
    assert all({chains.hosts[server] for server in chain.servers} == {"a", "b"} for chain in chains.chains)
    assert chains.num_copies[2] == 4


def test_nothing_moves_before_somebody_has_died_or_joined() -> None:
    chains = Chains.first(["a", "a", "b"], replicas=1, epoch=EPOCH)
    assert chains.is_of_the_start
    assert not chains.joined(3, "a").is_of_the_start
    assert not chains.died(0)[0].is_of_the_start


@pytest.mark.parametrize("options", [{"ranges": 4}, {"servers": 3, "replicas": 1, "ranges": 2}])
def test_key_ranges_without_copies_or_too_few_of_them_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=rf"ranges={options['ranges']} is for servers with replicas"):
        ParameterServer(**options)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    hosts=st.lists(st.sampled_from("abc"), min_size=2, max_size=5),
    per_server=st.integers(1, 3),
    failing=st.floats(0.0, 1.0),
    seed=SEEDS,
)
def test_moves_end_where_some_fail_and_the_others_are_made(
    hosts: list[str], per_server: int, failing: float, seed: int
) -> None:
    """What fails is set aside: nothing that could be done better without it is left undone."""
    chance = random.Random(seed)
    chains = Chains.first(hosts, replicas=1, epoch=EPOCH, num_ranges=per_server * len(hosts))
    for number in (len(hosts), len(hosts) + 1):
        chains = chains.died(chance.choice(sorted(chains.living)))[0].joined(number, chance.choice("abc"))
    if not all(chain.servers for chain in chains.chains):
        return
    pairs = {(chain.key_range, server) for chain in chains.chains for server in chains.living}
    fails = {pair for pair in sorted(pairs) if chance.random() < failing}
    for _ in range(1000):
        after = moved(chains)
        if after is None:
            break
        changed = next(new for old, new in zip(chains.chains, after.chains, strict=True) if new != old)
        before = chains.chains[changed.key_range]
        comers = {*changed.servers} - {*before.servers}
        moves = {(before.key_range, server) for server in (comers or {before.head} - {changed.head})}
        assert not moves & chains.set_aside
        chains = chains if moves & fails else after
        for move in moves & fails:
            chains = chains.without_move(*move)
    else:
        raise AssertionError("moves do not come to an end")
    assert all(len(chain.servers) <= 2 for chain in chains.chains)
    if not fails:
        assert {len(chain.servers) for chain in chains.chains} == {2}
    for chain in chains.chains:
        lacking = len(chain.servers) < 2
        assert not (lacking and {(chain.key_range, each) for each in chains.living - {*chain.servers}} - fails)
