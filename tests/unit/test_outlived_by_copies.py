"""Workers and servers die, and workers join, between any two messages, where servers have copies: what a worker has
pushed counts in all key ranges or in none, once, and nobody waits for whoever is gone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic import Done
from paceline.server.replication import ToServer
from paceline.server.spec import Push
from tests.covering import in_turns
from tests.unit.outlived_copies import (
    KINDS,
    PLACES,
    POINTS,
    WITH_A_SERVER,
    Net,
    Restored,
    RestoredRows,
    RowsNet,
    Training,
    require_each_counts_whole,
)
from tests.unit.replicated_servers import DEATHS, FOREVER, TWO_DEATHS, Death, Joining


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(["asp", "ssp", "bsp"]),
    places=st.sampled_from(sorted(PLACES)),
    death=DEATHS,
    seed=st.integers(0, 2**32),
    dies_after=POINTS,
    joins_after=st.none() | POINTS,
    lives_on=st.booleans(),
    kind=KINDS,
)
def test_a_worker_and_a_server_die(
    rule: str,
    places: str,
    death: Death,
    seed: int,
    dies_after: int,
    joins_after: int | None,
    lives_on: bool,
    kind: type[Net],
) -> None:
    require_each_counts_whole(
        rule,
        places,
        [death],
        replicas=1,
        seed=seed,
        dies_after=dies_after,
        joins_after=joins_after,
        lives_on=lives_on,
        kind=kind,
    )


@settings(max_examples=30, deadline=None)
@given(
    rule=st.sampled_from(["asp", "ssp", "bsp"]),
    places=st.sampled_from(sorted(PLACES)),
    deaths=TWO_DEATHS,
    seed=st.integers(0, 2**32),
    dies_after=st.none() | POINTS,
    joins_after=POINTS,
    kind=KINDS,
)
def test_a_worker_joins_and_two_servers_die(
    rule: str,
    places: str,
    deaths: list[Death],
    seed: int,
    dies_after: int | None,
    joins_after: int,
    kind: type[Net],
) -> None:
    require_each_counts_whole(
        rule, places, deaths, replicas=2, seed=seed, dies_after=dies_after, joins_after=joins_after, kind=kind
    )


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(["asp", "ssp", "bsp"]),
    places=st.sampled_from(sorted(PLACES)),
    deaths=TWO_DEATHS,
    seed=st.integers(0, 2**32),
    dies_after=st.none() | POINTS,
    joins_after=st.none() | POINTS,
    kind=st.sampled_from([Restored, RestoredRows]),
)
def test_copies_are_made_anew_while_workers_die_and_join(
    rule: str,
    places: str,
    deaths: list[Death],
    seed: int,
    dies_after: int | None,
    joins_after: int | None,
    kind: type[Net],
) -> None:
    require_each_counts_whole(
        rule, places, deaths, replicas=1, seed=seed, dies_after=dies_after, joins_after=joins_after, kind=kind
    )


def servers_come(joining: list[tuple[int, str]]) -> list[Joining]:
    return [Joining(after, host) for after, host in sorted(joining)]


@settings(max_examples=25, deadline=None)
@given(
    rule=st.sampled_from(["asp", "ssp", "bsp"]),
    places=st.sampled_from(sorted(PLACES)),
    deaths=st.lists(st.builds(Death, st.integers(0, 4), st.integers(1, 60), st.integers(0, 3)), max_size=3).map(
        lambda deaths: list({death.server: death for death in deaths}.values())
    ),
    seed=st.integers(0, 2**32),
    dies_after=st.none() | POINTS,
    joins_after=st.none() | POINTS,
    joining=st.lists(st.tuples(POINTS, st.sampled_from("abd")), min_size=1, max_size=2).map(servers_come),
    lives_on=st.booleans(),
    replicas=st.integers(1, 2),
)
def test_servers_join_while_workers_die_and_join(
    rule: str,
    places: str,
    deaths: list[Death],
    seed: int,
    dies_after: int | None,
    joins_after: int | None,
    joining: list[Joining],
    lives_on: bool,
    replicas: int,
) -> None:
    require_each_counts_whole(
        rule,
        places,
        deaths,
        replicas=replicas,
        seed=seed,
        dies_after=dies_after,
        joins_after=joins_after,
        lives_on=lives_on,
        kind=Restored,
        joining=joining,
    )


def require_that_a_worker_may_die_with_a_server(places: str, victim: int, kind: type[Net]) -> None:
    """After any of the server's messages."""
    for num_sent in range(1, 60):
        for seed in range(2):  # which says who dies
            rule = ("asp", "ssp", "bsp")[(num_sent + seed) % 3]
            death = Death(victim, num_sent, num_lost=num_sent // 3 % 3)
            about = {"replicas": 1, "seed": seed, "dies_after": WITH_A_SERVER, "kind": kind}
            require_each_counts_whole(rule, places, [death], **about)


@pytest.mark.parametrize(("victim", "places"), in_turns(sorted(PLACES), (0, 1, 2)))
def test_a_worker_dies_with_a_server_after_any_of_its_messages(places: str, victim: int) -> None:
    require_that_a_worker_may_die_with_a_server(places, victim, Net)


@pytest.mark.parametrize(("victim", "places"), in_turns(sorted(PLACES), (1, 2, 0)))
def test_a_worker_dies_with_a_server_of_rows_after_any_of_its_messages(places: str, victim: int) -> None:
    require_that_a_worker_may_die_with_a_server(places, victim, RowsNet)


def net_of(places: str) -> Net:
    return Net("asp", PLACES[places], replicas=1, deaths=[], seed=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_has_died_keeps_no_copy_from_being_made_anew(seed: int) -> None:
    """Its memory, which copies of before have open, cannot be opened any more."""
    net = Restored("asp", PLACES["one host"], replicas=1, deaths=[], seed=seed)
    Training(net, dead=0, lives_on=False).run(dies_after=20, joins_after=None)
    net.kill(Death(1, 0, 0))
    net.run()
    assert all(len(chain.servers) == 2 for chain in net.chains.chains)
    assert net.has_copied_all


def test_a_change_is_in_a_copy_whole_or_not_at_all() -> None:
    """A push to a server on the worker's host, which holds its key range in several pieces, is one change."""
    net = net_of("servers on one host")
    core, head = net.copies[0, 0]
    (copy_of,) = net.chains.chains[0].servers[1:]
    copy, tail = net.copies[copy_of, 0]
    push = next(
        send.message for send in net.clients[0].exchange(Push(pause_at=FOREVER, done=Done(0, 1))) if send.to == 0
    )
    entries = [action.message for action in head.receive(push, 0.0) if isinstance(action, ToServer)]
    assert len(entries) == len(core.parts) > 1
    for number, entry in enumerate(entries, start=1):
        list(tail.receive(entry, 0.0))
        assert {part.shard.iteration for part in copy.parts} == {int(number == len(entries))}


def test_memory_that_a_host_would_take_along_does_not_count() -> None:
    """Where servers are on several hosts, the one on the worker's host says no more than its copies could."""
    assert net_of("one host").copies[0, 0][0].attendance.part_with(0).reaches_memory
    assert not net_of("hosts with both").copies[0, 0][0].attendance.part_with(0).reaches_memory
