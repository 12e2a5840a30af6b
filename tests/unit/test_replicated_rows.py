"""Copies of rows of tables: servers die after any message, and no row, nor what its optimizer keeps, is another one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import RunFailed, UsageError
from paceline.messages import Kind, Message, WireError, split_frames
from paceline.server import entries
from paceline.server.chains import Chain
from paceline.server.conversation import hear
from paceline.server.tables import giving
from paceline.server.tables.spec import TableSpec
from paceline.server.tables.storage import TableFiles
from tests.covering import in_turns
from tests.unit.one_table import spec_of
from tests.unit.replicated_rows import (
    EXACT,
    NUM_KEYS,
    NUM_STEPS,
    NUM_WORKERS,
    QUICK,
    TABLES,
    RowsNet,
    Thread,
    assert_bsp_is_undisturbed,
    assert_each_gradient_counts_once,
    assert_same,
    make_net,
)
from tests.unit.replicated_servers import (
    DEATHS,
    EPOCH,
    HOSTS,
    PLACES,
    SEEDS,
    TWO_DEATHS,
    Death,
    Joining,
)


@QUICK
@given(death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_bsp_with_a_death_has_the_rows_of_the_undisturbed_run(death: Death, hosts: str, seed: int) -> None:
    assert_bsp_is_undisturbed(hosts, [death], seed, replicas=1)


@QUICK
@given(rule=st.sampled_from(["asp", "ssp"]), death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_every_gradient_of_rows_counts_once_whoever_dies(rule: str, death: Death, hosts: str, seed: int) -> None:
    assert_each_gradient_counts_once(rule, hosts, [death], seed, replicas=1)


@QUICK
@given(rule=st.sampled_from(["bsp", "asp"]), deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS)
def test_rows_outlive_two_deaths_with_two_replicas(rule: str, deaths: list[Death], hosts: str, seed: int) -> None:
    if rule == "bsp":
        assert_bsp_is_undisturbed(hosts, deaths, seed, replicas=2)
    else:
        assert_each_gradient_counts_once(rule, hosts, deaths, seed, replicas=2)


@pytest.mark.parametrize(("victim", "hosts"), in_turns(sorted(HOSTS), (1, 2, 0)))
def test_a_death_after_any_message(hosts: str, victim: int) -> None:
    """Under two rules by turns, of which another victim has the other one. So are the last two that it has sent lost,
    which to the others is as if it had sent two less."""
    for num_sent in range(1, 80):
        death = Death(victim, num_sent, num_lost=num_sent // 2 % 2 * 2)
        if (num_sent + victim) % 2:
            assert_bsp_is_undisturbed(hosts, [death], num_sent, replicas=1)
        else:
            assert_each_gradient_counts_once("asp", hosts, [death], num_sent, replicas=1)


def test_copies_get_one_gradient_an_update_however_many_workers_push() -> None:
    net = make_net("bsp", EXACT, hosts="one host")
    net.train(is_exact=True)
    (spec,) = EXACT
    row_bytes = 8 + spec.dim * spec.dtype.itemsize
    assert net.rows_bytes == [NUM_STEPS * NUM_KEYS * row_bytes, NUM_WORKERS * NUM_STEPS * NUM_KEYS * row_bytes]


@pytest.mark.parametrize("hosts", sorted(HOSTS))
def test_rows_that_were_loaded_outlive_their_servers(hosts: str) -> None:
    source, net = (make_net("bsp", TABLES, hosts=hosts) for _ in range(2))
    source.train(is_exact=False)

    def loaded() -> Thread:
        for index, state in enumerate(source.states()):
            yield net.tables[0], net.tables[0].set_state(index, state)
            net.tables[0].require_done()

    net.do_all([loaded()])
    net.kill(Death(1, 0, 0))
    net.run()
    for own, expected in zip(net.states(), source.states(), strict=True):
        assert_same(own, expected)


def test_a_copy_that_does_not_see_the_files_says_so() -> None:
    net = make_net("bsp", EXACT, hosts="three hosts")
    (copy,) = net.chains.chains[0].servers[1:]
    core, *_ = net.copies[copy, 0]
    about = {"table": 0, "directory": "/nonesuch", "num_servers": 3, "server": 0, "files": [["rows", 1, 0]]}
    said = {"what": "tables", "kind": Kind.LOAD_ROWS.value, "worker": 0, "at": 0, "body": about}
    entry = Message(Kind.REPLICATE, 0, body=said)
    with pytest.raises(RunFailed, match=r"a copy of tables cannot do .* where the hosts of all servers see them"):
        entries.apply(entry, core, entries.zeroed(core.parts), lambda _: None)


def test_a_server_that_does_not_want_to_know_a_worker_ends_what_that_asks() -> None:
    net = make_net("bsp", EXACT, hosts="one host")
    client, tables = net.clients[0], net.tables[0]
    tables.read({0: torch.arange(NUM_KEYS)})
    client.moved(1, epoch=EPOCH + 1, is_beside=True, body={})
    refused = Message(Kind.ERROR, EPOCH + 1, body={"error": "server 2: it only has a copy"})
    with pytest.raises(WireError, match="it only has a copy"):
        list(hear(client, tables, 1, refused))


def test_a_push_whose_frames_do_not_part_is_refused() -> None:
    assert split_frames([b"abc", b"de", b"f"], 5) == ([b"abc", b"de"], [b"f"])
    assert split_frames([b"abc"], 0) == ([], [b"abc"])
    for num_bytes in (4, 9):
        with pytest.raises(WireError, match="do not end where its tensors do"):
            split_frames([b"abc", b"de"], num_bytes)


# --- copies that are made anew -------------------------------------------------------------------------------------

FOUR_HOSTS = {"one host": ["a"] * 4, "four hosts": ["a", "b", "c", "d"], "two hosts": ["a", "a", "b", "b"]}
SOME_DEATHS = st.lists(
    st.builds(Death, st.integers(0, 3), st.integers(1, 120), st.integers(0, 3)),
    min_size=1,
    max_size=3,
    unique_by=lambda death: death.server,
)
ALL_TABLES = [
    spec_of("adam:lr=0.1", num_rows=2**60, dtype=torch.bfloat16, min_count=2),
    spec_of("ftrl:lr=0.1", std=0.0, evict_after=16, max_rows=8, min_count=2),
    spec_of("sgd:lr=0.5", max_rows=6),
]


@pytest.fixture(autouse=True, scope="module")
def _one_row_a_piece() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(giving, "PIECE_BYTES", 1)
        yield


class RestoredRows(RowsNet):
    copies_anew = True
    num_steps = 6

    def __init__(self, rule: str, specs: Sequence[TableSpec], **about: Any) -> None:
        self.num_pieces = self.num_meanwhile = 0
        """Pieces that were sent, and updates that went to a newcomer among them."""
        super().__init__(rule, specs, **about)

    def put(self, source: str, target: str, key_range: int, item: Any) -> None:
        if source[0] == "s" and target[0] == "s":
            message = Message.decode(item, epoch=None)
            what = message.body.get("what")
            self.num_meanwhile += what == "row states" and self.num_pieces > 0
            if what == "piece":
                self.num_pieces += 1
                others = (Message.decode(each, epoch=None) for each in self.ways.get((source, target, key_range), ()))
                assert all(other.body.get("what") != "piece" for other in others), "the one before has yet to come"
                keys = [each for each in message.body["tensors"] if each[0].endswith((".keys", ".waiting_keys"))]
                assert sum(shape[0] for _, _, shape in keys) <= 1
        super().put(source, target, key_range, item)


def restored(
    rule: str, specs: Sequence[TableSpec], *, hosts: str, deaths: Iterable[Death] = (), seed: int = 0, replicas: int = 1
) -> RestoredRows:
    return RestoredRows(rule, specs, hosts=FOUR_HOSTS[hosts], replicas=replicas, deaths=deaths, seed=seed)


@functools.cache
def undisturbed_on_four() -> list[dict[str, Tensor]]:
    net = restored("bsp", ALL_TABLES, hosts="one host", replicas=0)
    net.train(is_exact=False)
    assert all(len(state["keys"]) for state in net.states())
    return net.states()


@settings(max_examples=8, deadline=None)
@given(deaths=SOME_DEATHS, hosts=st.sampled_from(sorted(FOUR_HOSTS)), seed=SEEDS, replicas=st.integers(1, 2))
def test_rows_are_copied_anew(deaths: list[Death], hosts: str, seed: int, replicas: int) -> None:
    """One copy more than the head's outlives deaths one after another; rows stay those of the undisturbed run."""
    net = restored("bsp", ALL_TABLES, hosts=hosts, deaths=deaths, seed=seed, replicas=replicas)
    net.train(is_exact=False)
    for own, expected in zip(net.states(), undisturbed_on_four(), strict=True):
        assert_same(own, expected)
    net.assert_copies_are_equal()
    net.assert_rows_of_copies_are_equal()
    net.assert_none_is_lacking()


@settings(max_examples=8, deadline=None)
@given(
    rule=st.sampled_from(["asp", "ssp"]),
    deaths=SOME_DEATHS,
    hosts=st.sampled_from(sorted(FOUR_HOSTS)),
    seed=SEEDS,
    replicas=st.integers(1, 2),
)
def test_every_gradient_counts_once_in_rows_that_are_copied_anew(
    rule: str, deaths: list[Death], hosts: str, seed: int, replicas: int
) -> None:
    net = restored(rule, EXACT, hosts=hosts, deaths=deaths, seed=seed, replicas=replicas)
    net.train(is_exact=True)
    (state,) = net.states()
    assert state["keys"].tolist() == list(range(NUM_KEYS))
    assert (state["rows"] == 1.0 - 2.0 ** (NUM_WORKERS * net.num_steps)).all()
    net.assert_copies_are_equal()
    net.assert_rows_of_copies_are_equal()
    net.assert_none_is_lacking()


JOINING = st.lists(st.builds(Joining, st.integers(0, 200), st.sampled_from("abe")), min_size=1, max_size=2).map(
    lambda joining: sorted(joining, key=lambda each: each.after)
)


def assert_grown_is_undisturbed(
    deaths: Sequence[Death], joining: Sequence[Joining], hosts: str, seed: int, replicas: int
) -> RestoredRows:
    net = restored("bsp", ALL_TABLES, hosts=hosts, deaths=deaths, seed=seed, replicas=replicas)
    net.joining = list(joining)
    net.train(is_exact=False)
    for own, expected in zip(net.states(), undisturbed_on_four(), strict=True):
        assert_same(own, expected)
    net.assert_copies_are_equal()
    net.assert_rows_of_copies_are_equal()
    net.assert_none_is_lacking()
    return net


@settings(max_examples=8, deadline=None)
@given(
    deaths=SOME_DEATHS,
    joining=JOINING,
    hosts=st.sampled_from(sorted(FOUR_HOSTS)),
    seed=SEEDS,
    replicas=st.integers(1, 2),
)
def test_rows_go_to_servers_that_join(
    deaths: list[Death], joining: list[Joining], hosts: str, seed: int, replicas: int
) -> None:
    assert_grown_is_undisturbed(deaths, joining, hosts, seed, replicas)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    deaths=SOME_DEATHS,
    joining=JOINING,
    hosts=st.sampled_from(sorted(FOUR_HOSTS)),
    seed=SEEDS,
    replicas=st.integers(1, 2),
)
def test_rows_go_to_servers_that_join_in_many_orders(
    deaths: list[Death], joining: list[Joining], hosts: str, seed: int, replicas: int
) -> None:
    assert_grown_is_undisturbed(deaths, joining, hosts, seed, replicas)


def test_rows_are_handed_over_by_servers_that_live() -> None:
    """The new server serves a dead one's key range, of which another one had a copy."""
    net = assert_grown_is_undisturbed([Death(0, 40, 0)], [Joining(300, "a")], "one host", seed=1, replicas=1)
    assert net.num_copied["handed over"]
    assert {chain.head for chain in net.chains.chains} == {1, 2, 3, 4}


def test_rows_go_in_pieces_while_updates_go_on() -> None:
    """Or the tests above would say little."""
    found = [0, 0]
    for seed in range(4):
        net = restored("asp", EXACT, hosts="one host", deaths=[Death(0, 40, 0)], seed=seed)
        net.train(is_exact=True)
        found = [found[0] + net.num_pieces, found[1] + net.num_meanwhile]
    assert min(found) > 5


class Failing(RestoredRows):
    """The first one that is to become a copy has no room for tables, and the second one none for all of its rows."""

    num_built = 0

    def build(self, server: int, chain: Chain) -> None:
        spec = self.server_specs[chain.key_range]
        self.num_built += server == chain.newcomer
        if server == chain.newcomer and self.num_built == 1:
            self.server_specs[chain.key_range] = replace(spec, table_files=TableFiles("/dev/null/tables", 1 << 20))
        super().build(server, chain)
        self.server_specs[chain.key_range] = spec
        tables = self.copies[server, chain.key_range][0].tables
        if server == chain.newcomer and self.num_built == 2:
            take, num_taken = tables.take_states, iter(range(NUM_KEYS))

            def take_some(states: Mapping[str, Tensor]) -> None:
                if next(num_taken) == 2:
                    raise UsageError("no room for more rows")
                take(states)

            setattr(tables, "take_states", take_some)  # noqa: B010


@pytest.mark.parametrize("victim", range(2))
def test_who_has_no_room_becomes_no_copy_and_another_attempt_does(victim: int) -> None:
    deaths = [Death(victim, 40, 0), Death((victim + 2) % 4, 200, 1)]
    net = Failing("bsp", ALL_TABLES, hosts=FOUR_HOSTS["one host"], replicas=1, deaths=deaths, seed=victim)
    net.train(is_exact=False)
    for own, expected in zip(net.states(), undisturbed_on_four(), strict=True):
        assert_same(own, expected)
    net.assert_copies_are_equal()
    net.assert_rows_of_copies_are_equal()
    net.assert_none_is_lacking()
    refused = sorted(why for why in net.num_copied if why)
    assert refused[0].startswith("a copy of tables cannot do what the server before it has done: refused OPEN_TABLES")
    assert "no room for more rows" in refused[1]
