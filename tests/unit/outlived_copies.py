"""Workers and servers with copies: workers die and join as servers do, and a launcher tells the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.elastic import Done
from paceline.messages import Message
from paceline.server.actions import Send
from paceline.server.chains import Chain, from_body, to_body
from paceline.server.replication import Copied, HandedOver, Replication
from paceline.server.spec import Push
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.dividing import joined
from paceline.server.tables.spec import RowGradients
from paceline.server.whole_pushes import what_counts
from tests.unit import replicated_servers
from tests.unit.one_table import NUM_ROWS, spec_of
from tests.unit.replicated_servers import EPOCH, FOREVER, LAYOUT, PLAIN, Death, Joining

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
        """The memory of a dead worker cannot be opened any more; where it is open, it stays so."""
        is_open = (message.sender, server, key_range) in self.reached
        is_lost = f"w{message.sender}" in self.silent and self.is_beside(message.sender, server)
        if is_open or not is_lost:
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
