"""Workers and servers die, and workers join, between any two messages, where servers have copies: what a worker has
pushed counts in all key ranges or in none, once, and nobody waits for whoever is gone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.elastic import Done
from paceline.messages import Message
from paceline.server.actions import Send
from paceline.server.chains import Chain, from_body, to_body
from paceline.server.replication import Copied, HandedOver, Replication, ToServer
from paceline.server.spec import Push
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.dividing import joined
from paceline.server.tables.spec import RowGradients
from paceline.server.whole_pushes import what_counts
from tests.covering import in_turns
from tests.unit import replicated_servers
from tests.unit.one_table import NUM_ROWS, spec_of
from tests.unit.replicated_servers import DEATHS, EPOCH, FOREVER, LAYOUT, PLAIN, TWO_DEATHS, Death, Joining

STEPS, NUM_WORKERS, JOINER = 3, 2, 2
TABLE = spec_of("sgd:lr=1", std=0.0)
WITH_A_SERVER = 10**4
"""A worker dies at once with the first server, if any dies before it has come to its end."""
Call = Callable[[Replication, Callable[[Any], None]], Any]
Asking = Generator[None, None, Any]


@dataclass(frozen=True)
class Places:
    """The hosts of servers, and those of the workers, of whom the last one joins."""

    servers: tuple[str, ...]
    workers: tuple[str, ...]


PLACES = {
    "one host": Places(("a", "a", "a"), ("a", "a", "a")),
    "servers on one host": Places(("a", "a", "a"), ("a", "b", "b")),
    "hosts with both": Places(("a", "b", "c"), ("a", "b", "c")),
    "two hosts with both": Places(("a", "b", "b"), ("b", "a", "b")),
    "hosts apart": Places(("a", "b", "c"), ("d", "d", "e")),
}


class Net(replicated_servers.Net):
    """And a launcher, which asks whoever serves each key range, and asks again where another one has taken over."""

    num_joiners = 1
    piece_bytes = 48  # each server has several

    def __init__(
        self, rule: str, places: Places, *, replicas: int, deaths: Sequence[Death], seed: int, **about: Any
    ) -> None:
        self.serving: dict[int, int] = {}
        self.present: set[int] = set()
        self.launcher: Asking | None = None
        self.silent: set[str] = set()
        self.later: dict[int, list[Any]] = {}  # what workers have yet to look at
        super().__init__(
            rule,
            num_workers=NUM_WORKERS + 1,
            hosts=places.servers,
            replicas=replicas,
            spec=PLAIN,
            deaths=deaths,
            seed=seed,
            outlives_workers=True,
            worker_hosts=places.workers,
            **about,
        )
        self.serving = {chain.key_range: chain.head for chain in self.chains.chains}
        self.present = set(range(len(self.clients)))

    def kill(self, death: Death) -> None:
        super().kill(death)
        for key_range, server in list(self.serving.items()):
            if server == death.server:
                del self.serving[key_range]

    def hear_of(self, target: str, item: Any) -> None:
        number = int(target[1:])
        if target[0] == "w" and self.is_idle(number):  # it looks when it asks for something
            self.later.setdefault(number, []).append(item)
        elif target[0] == "w":
            super().hear_of(target, item)
        elif isinstance(item, dict):
            chain = from_body(item)
            if self.reform(number, chain):
                self.put(target, "launcher", chain.key_range, chain)
        else:
            self.call(number, *item)

    def call(self, server: int, key_range: int, call: Call, said: dict[int, Any]) -> None:
        """The launcher asks this of it."""
        _, copy = self.copies[server, key_range]
        if copy.has_stopped:
            again = partial(self.call, server, key_range, call, said)
            self.put_off.setdefault((server, key_range), []).append(again)
        else:
            say = partial(self._say, f"s{server}", (key_range, call, said), said)
            self.do(server, key_range, call(copy, say))

    def _say(self, server: str, item: Any, said: dict[int, Any], what: Any) -> None:
        self.put(server, "launcher", item[0], (item[0], said, what))

    def ask(self, worker: int, sends: Iterable[Send]) -> None:
        super().ask(worker, sends)
        if not self.is_idle(worker):
            for item in self.later.pop(worker, []):
                super().hear_of(f"w{worker}", item)

    def push(self, worker: int, value: float, push: Push) -> None:
        for gradient in LAYOUT.views(self.buffers[worker][1]):
            gradient.fill_(value)
        self.ask(worker, self.clients[worker].exchange(push))

    def rows(self) -> dict[str, Tensor] | None:
        """Of tables, if there are any."""
        return None

    def take(self, source: str, target: str, key_range: int, item: Any) -> None:
        if target == "launcher":
            self.hear(key_range, item)
        elif target not in self.silent:
            super().take(source, target, key_range, item)

    def deliver_one(self) -> bool:
        if self.launcher is not None and self.random.random() < 0.2:
            return self.go_on()
        return super().deliver_one() or (self.launcher is not None and self.go_on())

    def attach_copy(self, server: int, key_range: int, message: Message) -> bool:
        """The memory of a dead worker cannot be opened any more."""
        is_lost = f"w{message.sender}" in self.silent and self.is_beside(message.sender, server)
        if not is_lost:
            return super().attach_copy(server, key_range, message)
        self.copies[server, key_range][0].attach(message, gradients=None, parameters=None, is_beside=False)
        return len(set(self.hosts)) > 1

    def move(self, *, may_hand_over: bool = True) -> bool:
        """Nobody is asked about a key range that is about to be handed over."""
        is_served = len(self.serving) == len(self.chains.chains)
        return is_served and super().move(may_hand_over=may_hand_over and self.launcher is None)

    def hear(self, key_range: int, item: Any) -> None:
        """The launcher has word of a server: that it serves, what has become of a new copy, or what it was asked."""
        if isinstance(item, Copied | HandedOver):
            self.hear_of_copies(key_range, item)
        elif not isinstance(item, Chain):
            _, said, what = item
            said.setdefault(key_range, what)
        elif item.head not in self.dead and key_range not in self.serving and item.epoch == self.epoch_of(key_range):
            self.serving[key_range] = item.head
            for worker in self.present:
                self.put("launcher", f"w{worker}", key_range, to_body(item))

    def epoch_of(self, key_range: int) -> int:
        return self.chains.chains[key_range].epoch

    def tell(self, chain: Chain) -> None:
        if chain.epoch > self.epoch_of(chain.key_range):  # handed over
            self.serving.pop(chain.key_range, None)
        super().tell(chain)

    def go_on(self) -> bool:
        """What the launcher does; whether there is anything."""
        assert self.launcher is not None
        try:
            next(self.launcher)
        except StopIteration:
            self.launcher = None
        return True

    def asked(self, call: Call) -> Asking:
        """Returns what is said of each key range."""
        said: dict[int, Any] = {}
        asked: dict[int, int] = {}
        for chain in self.chains.chains:
            if chain.handover is not None:
                self.tell(replace(chain, handover=None))
        while len(said) < len(self.chains.chains):
            for key_range, server in self.serving.items():
                if key_range not in said and asked.get(key_range) != server:
                    asked[key_range] = server
                    self.put("launcher", f"s{server}", key_range, (key_range, call, said))
            yield
        return [said[key_range] for key_range in sorted(said)]


class RowsNet(Net):
    """Each push has gradients of rows as well, with the values that those of parameters have."""

    def __init__(self, rule: str, places: Places, *, deaths: Sequence[Death], **named: Any) -> None:
        self.next: dict[int, Callable[[], None]] = {}  # by worker whose gradients of rows are on their way
        super().__init__(rule, places, deaths=[], **named)
        about = {"epoch": EPOCH, "num_servers": len(self.hosts)}
        self.tables = [TableClient([TABLE], rank=rank, **about) for rank in range(len(self.clients))]
        self.talks = {0: self.tables[0]}
        self.ask(0, self.tables[0].open())
        self.run()
        self.tables[0].require_done()
        del self.talks[0]
        self.deaths = {death.server: death for death in deaths}

    def push(self, worker: int, value: float, push: Push) -> None:
        keys = torch.arange(NUM_ROWS)
        gradients = RowGradients(keys, torch.full((NUM_ROWS, TABLE.dim), value, dtype=TABLE.dtype))
        assert not self.clients[worker].rows_come_along
        self.talks[worker] = self.tables[worker]
        self.next[worker] = partial(super().push, worker, value, push)
        clock = self.clients[worker].clock
        self.ask(worker, self.tables[worker].push([gradients], weight=1.0, clock=clock))

    def take(self, source: str, target: str, key_range: int, item: Any) -> None:
        super().take(source, target, key_range, item)
        worker = int(target[1:]) if target[0] == "w" else -1
        if worker in self.next and super().is_idle(worker):
            self.tables[worker].require_done()
            del self.talks[worker]
            self.next.pop(worker)()

    def is_idle(self, worker: int) -> bool:
        return worker not in self.next and super().is_idle(worker)

    def tables_of(self, server: int, key_range: int) -> list[dict[str, Tensor]]:
        return [table.state() for table in self.copies[server, key_range][0].tables._tables]

    def rows(self) -> dict[str, Tensor]:
        """Raises AssertionError where copies differ."""
        for chain in self.chains.chains:
            first, *others = [self.tables_of(server, chain.key_range) for server in chain.servers]
            for (own,), (its,) in ((first, other) for other in others):
                assert all(torch.equal(own[name], tensor) for name, tensor in its.items())
        return joined([self.tables_of(chain.head, chain.key_range)[0] for chain in self.chains.chains])


class Restored(Net):
    copies_anew = True


class RestoredRows(RowsNet):
    copies_anew = True


class Training:
    """Each worker pushes so many times, whenever it may, and leaves; but for the one that dies, and the one that comes
    when the launcher has let it in."""

    def __init__(self, net: Net, *, dead: int | None, lives_on: bool) -> None:
        self.net, self.dead, self.lives_on = net, dead, lives_on
        self.steps, self.asked = [0] * len(net.clients), [""] * len(net.clients)
        self.acting = set(range(NUM_WORKERS))
        self.done, self.begins = Done(0, STEPS), 0
        self.has_died = self.has_joined = False

    def die(self) -> None:
        """Of what the worker has sent to each server the last part may be lost."""
        assert self.dead is not None
        net, self.has_died = self.net, True
        if not self.lives_on:
            self.acting.discard(self.dead)
            net.silent.add(f"w{self.dead}")
            for (source, _, _), queue in net.ways.items():
                if source == f"w{self.dead}":
                    for _ in range(net.random.randint(0, len(queue))):
                        queue.pop()

    def letting_go(self) -> Asking:
        dead, net = self.dead, self.net
        net.present.discard(dead)
        counts = what_counts((yield from net.asked(lambda copy, say: copy.part_with(dead, say))))
        self.done = Done() if counts is None else Done(*counts.body["done"])
        yield from net.asked(lambda copy, say: copy.let_go(dead, counts, say, 0.0))
        self.acting.discard(dead)

    def letting_in(self) -> Asking:
        net = self.net
        self.begins = max((yield from net.asked(lambda copy, say: copy.expect(JOINER, say))))
        yield from net.asked(lambda copy, say: copy.let_in(JOINER, self.begins, say, 0.0))
        net.ask(JOINER, net.clients[JOINER].wait(pause_at=FOREVER))
        self.asked[JOINER] = "wait"
        self.acting.add(JOINER)
        self.has_joined = True

    def go_on(self) -> None:
        for worker in list(self.acting):
            client = self.net.clients[worker]
            if self.asked[worker] == "left" or (self.asked[worker] and not self.net.is_idle(worker)):
                continue
            if self.asked[worker]:
                client.require_done()
            if self.asked[worker] == "push":
                client.settle(client.reply())
            if self.asked[worker] == "leave":
                self.asked[worker] = "left"
                continue
            if self.asked[worker]:
                assert client.reply().admitted
                self.steps[worker] += self.asked[worker] == "push"
            if self.steps[worker] < STEPS:
                self.asked[worker] = "push"
                push = Push(pause_at=FOREVER, done=Done(0, self.steps[worker] + 1))
                self.net.push(worker, value_of(worker, self.steps[worker]), push)
            else:
                self.asked[worker] = "leave"
                self.net.ask(worker, client.leave())

    def run(self, *, dies_after: int | None, joins_after: int | None) -> None:
        num_delivered, net = 0, self.net
        to_do: list[tuple[int, str]] = sorted(
            (after, what) for after, what in ((dies_after, "die"), (joins_after, "join")) if after is not None
        )
        self.go_on()
        while True:
            if to_do and num_delivered >= (0 if to_do[0][0] == WITH_A_SERVER and net.dead else to_do[0][0]):
                if to_do[0][1] == "join" and net.launcher is None:
                    to_do.pop(0)
                    net.launcher = self.letting_in()
                elif to_do[0][1] == "die" and not self.has_died:
                    self.die()
                if to_do and to_do[0][1] == "die" and net.launcher is None:
                    to_do.pop(0)
                    net.launcher = self.letting_go()
            if not net.deliver_one() and (not to_do or to_do[0][0] == WITH_A_SERVER):
                break
            num_delivered += 1
            self.go_on()
        living = [worker for worker in self.acting if not (self.has_died and worker == self.dead)]
        assert all(self.asked[worker] == "left" for worker in living), (self.asked, [c.due for c in net.clients])


def value_of(worker: int, step: int) -> float:
    return 2.0 ** (worker * STEPS + step)


def counted(training: Training) -> dict[int, dict[int, float]]:
    """By clock, of each worker: what it pushed for it that is to count."""
    by_clock: dict[int, dict[int, float]] = {}
    for worker in range(NUM_WORKERS + training.has_joined):
        num = training.done.own if training.has_died and worker == training.dead else STEPS
        first = training.begins if worker == JOINER else 0
        for step in range(num):
            by_clock.setdefault(first + step, {})[worker] = value_of(worker, step)
    return by_clock


def require_each_counts_whole(
    rule: str,
    places: str,
    deaths: Sequence[Death],
    *,
    replicas: int,
    seed: int,
    dies_after: int | None,
    joins_after: int | None = None,
    lives_on: bool = False,
    kind: type[Net] = Net,
    joining: Sequence[Joining] = (),
) -> None:
    net = kind(rule, PLACES[places], replicas=replicas, deaths=deaths, seed=seed)
    hosts = PLACES[places].servers  # where all servers are on one host at first, others come to that one
    net.joining = [each if len(set(hosts)) > 1 else replace(each, host=hosts[0]) for each in joining]
    training = Training(net, dead=None if dies_after is None else seed % NUM_WORKERS, lives_on=lives_on)
    training.run(dies_after=dies_after, joins_after=joins_after)
    clocks = counted(training).values()
    parts = sum(sum(each.values()) / (len(each) if rule == "bsp" else 1) for each in clocks)
    found = torch.cat([tensor.double().reshape(-1) for tensors in net.heads_parameters() for tensor in tensors])
    assert found[found != 0].tolist() == pytest.approx([-parts] * int((found != 0).sum()), rel=1e-6)
    assert int((found != 0).sum()) >= (101 if parts else 0)
    net.assert_copies_are_equal()
    rows = net.rows()
    if rows is not None:
        assert rows["keys"].tolist() == (list(range(NUM_ROWS)) if parts else [])
        assert rows["rows"].flatten().tolist() == pytest.approx([-parts] * rows["rows"].numel(), rel=1e-6)


POINTS, KINDS = st.integers(0, 90), st.sampled_from([Net, RowsNet])


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
    assert net_of("one host").copies[0, 0][0].part_with(0).reaches_memory
    assert not net_of("hosts with both").copies[0, 0][0].part_with(0).reaches_memory
