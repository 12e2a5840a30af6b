"""The key-value store's protocol without sockets, under any order of messages."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import UsageError
from paceline.kv import Function, Spec
from paceline.kv.client_core import ClientCore
from paceline.kv.server_core import ServerCore
from paceline.kv.spec import MOST_KEYS
from paceline.membership import Membership
from paceline.messages import Kind, Message, Raw
from paceline.server.admission import AdmissionRule
from tests.unit.kv_spec import NUM_KEYS, spec_of, tensor


@dataclass
class World:
    """Cores of both ends, and the messages on their way: in order between two ends, else in any."""

    spec: Spec
    draw: random.Random
    servers: list[ServerCore] = field(init=False)
    clients: list[ClientCore] = field(init=False)
    ways: dict[tuple[str, int, int], deque[Sequence[Raw]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.servers = [ServerCore(self.spec, index) for index in range(self.spec.servers)]
        self.clients = [ClientCore(self.spec, worker) for worker in range(self.spec.workers)]

    def ask(self, worker: int, *content: Any, **about: Any) -> int:
        timestamp, sends = self.clients[worker].ask(*content, **about)
        for index, message in sends:
            self.put(("to", worker, index), message)
        return timestamp

    def put(self, way: tuple[str, int, int], message: Message) -> None:
        self.ways.setdefault(way, deque()).append(message.encode())  # not copied before it arrives, as ZeroMQ does

    def move(self) -> bool:
        """One message arrives; whether there was one."""
        ways = [way for way, messages in self.ways.items() if messages]
        if not ways:
            return False
        way = self.draw.choice(ways)
        message = Message.decode([bytes(frame) for frame in self.ways[way].popleft()], epoch=None)
        end, worker, index = way
        if end == "from":
            self.clients[worker].receive(index, message)
        else:
            for to, answer in self.servers[index].receive(message):
                self.put(("from", to, index), answer)
        return True

    def settle(self) -> None:
        while self.move():
            pass


def plan_of(num_pushes: int, draw: random.Random) -> list[str]:
    return [draw.choice(["push", "push-after", "pull", "pull-after", "pull-clock"]) for _ in range(num_pushes * 2)]


RULES: list[tuple[str, Mapping[str, Any], float]] = [
    ("asp", {}, float("inf")),
    ("ssp", {"staleness": 1}, 1),
    ("bsp", {}, 0),
]


@given(seed=st.integers(0, 10**6), rule=st.sampled_from(RULES), servers=st.integers(1, 3), workers=st.integers(1, 3))
def test_a_pull_has_what_it_waited_for_in_any_order_of_messages(
    seed: int, rule: tuple[str, Mapping[str, Any], float], servers: int, workers: int
) -> None:
    """Every push adds a power of 2 of its own to all keys of its range, so that a value says which pushes it has."""
    name, options, staleness = rule
    draw = random.Random(seed)
    world = World(spec_of(servers=servers, workers=workers, rule=name, rule_options=options), draw)
    num_pushes, bit = 5, {}
    pushed: list[list[int]] = [[] for _ in range(workers)]
    pulls: list[tuple[int, int, int, set[tuple[int, int]]]] = []
    plans = [deque(plan_of(num_pushes, draw)) for _ in range(workers)]
    common = min(sum(what.startswith("push") for what in plan) for plan in plans)
    while any(plans) or any(world.ways.values()):
        if draw.random() < 0.6 and world.move():
            continue
        ready = [worker for worker in range(workers) if plans[worker]]
        if not ready:
            continue
        worker = draw.choice(ready)
        what = plans[worker].popleft()
        earlier = pushed[worker][-1:]
        if what.startswith("push"):
            number = len(pushed[worker])
            value = bit[worker, number] = 2.0 ** len(bit)
            keys = draw.choice([range(NUM_KEYS), torch.arange(NUM_KEYS)])
            values = torch.full((NUM_KEYS,), value, dtype=torch.float64)
            after = earlier if what == "push-after" else ()
            pushed[worker].append(world.ask(worker, Kind.PUSH_VALUES, keys, values, after=after))
        else:
            clock = draw.randint(0, common) if what == "pull-clock" else 0
            keys_ = sorted(draw.sample(range(NUM_KEYS), 4))
            must = {(worker, len(pushed[worker]) - 1)} if what == "pull-after" and earlier else set()
            after = earlier if what == "pull-after" else ()
            timestamp = world.ask(worker, Kind.PULL_VALUES, tensor(keys_), after=after, clock=clock)
            pulls.append((worker, timestamp, clock, must))
    for worker in range(workers):
        world.ask(worker, Kind.LEAVE)
    world.settle()

    for worker, timestamp, clock, must in pulls:
        values = world.clients[worker].take_pairs(timestamp).values[:, 0]
        for value in values.tolist():  # each key's by itself: servers are not at the same clock
            has = {which for which, power in bit.items() if int(value) // int(power) % 2}
            assert must <= has
            for other in range(workers):
                numbers = sorted(number for who, number in has if who == other)
                assert numbers == list(range(len(numbers)))  # none is missing, and none made twice
                assert len(numbers) >= clock
            own = sum(who == worker for who, _ in has)
            for other in range(workers):
                others = sum(who == other for who, _ in has)
                if name == "bsp":
                    assert others == min(own, len(pushed[other])) or own == len(pushed[worker])
                assert others >= min(own - staleness, len(pushed[other]))
    total = sum(bit.values())
    for server in world.servers:
        assert server.is_deserted
        if total:
            assert server.rows.read(torch.arange(server.owned.start, server.owned.stop)).unique().tolist() == [total]


def test_a_request_waits_for_those_that_it_names_and_pulls_overtake_others() -> None:
    world = World(spec_of(servers=1), random.Random(0))
    one = torch.ones(1, dtype=torch.float64)
    world.ask(0, Kind.PUSH_VALUES, tensor([4]), one)
    late = world.ask(0, Kind.PULL_VALUES, range(0, NUM_KEYS), clock=1)
    behind = world.ask(0, Kind.PUSH_VALUES, tensor([3]), one, after=[late])
    pull = world.ask(0, Kind.PULL_VALUES, tensor([3]), after=[behind])
    free = world.ask(0, Kind.PULL_VALUES, tensor([3]))
    world.settle()
    assert [world.clients[0].is_done(each) for each in (late, behind, pull, free)] == [False, False, False, True]
    for _ in range(2):
        world.ask(1, Kind.PUSH_VALUES, tensor([5]), one)
    world.ask(1, Kind.LEAVE)
    world.settle()
    assert world.clients[0].take_pairs(late).keys.tolist() == [4, 5]
    assert world.clients[0].take_pairs(pull).values.item() == 1
    assert world.clients[0].take_pairs(free).values.item() == 0


def test_all_servers_count_a_workers_pushes_in_their_order() -> None:
    world = World(spec_of(), random.Random(0))
    late = world.ask(0, Kind.PULL_VALUES, range(0, 6), clock=1)  # which server 0 alone is asked
    world.ask(1, Kind.PUSH_VALUES, range(0, 6), torch.ones(6, dtype=torch.float64))
    world.ask(0, Kind.PUSH_VALUES, tensor([]), torch.empty(0, dtype=torch.float64))
    world.settle()
    world.clients[0].take_pairs(late)
    late = world.ask(0, Kind.PULL_VALUES, range(0, 6), clock=2)
    pushes = []
    for value, after in ((1.0, [late]), (2.0, [])):
        values = torch.full((NUM_KEYS,), value, dtype=torch.float64)
        pushes.append(world.ask(0, Kind.PUSH_VALUES, range(NUM_KEYS), values, function="assign", after=after))
    world.settle()
    assert not any(world.clients[0].is_done(push) for push in pushes)  # neither overtakes the other on server 0
    world.ask(0, Kind.LEAVE, drops=True)
    world.settle()
    assert len(world.servers[0].rows.keys) == 6
    assert world.servers[1].rows.read(tensor([6]))[0].item() == 2


def test_what_is_asked_may_be_changed_at_once() -> None:
    world = World(spec_of(), random.Random(0))
    keys, values = tensor([1, 2, 8, 9]), torch.ones(4, dtype=torch.float64)
    world.ask(0, Kind.PUSH_VALUES, keys, values)
    pull = world.ask(0, Kind.PULL_VALUES, keys)
    keys += 1
    values.zero_()
    world.settle()
    found = world.clients[0].take_pairs(pull)
    assert found.keys.tolist() == [1, 2, 8, 9]
    assert found.values[:, 0].tolist() == [1, 1, 1, 1]
    again = world.ask(0, Kind.PULL_VALUES, keys)  # other keys have another name
    world.settle()
    assert world.clients[0].take_pairs(again).values[:, 0].tolist() == [1, 0, 1, 0]


def test_an_answer_on_its_way_is_not_changed_by_later_pushes() -> None:
    world = World(spec_of(servers=1), random.Random(0))
    ones = torch.ones(NUM_KEYS, dtype=torch.float64)
    for kind in (Kind.PUSH_VALUES, Kind.PULL_VALUES, Kind.PUSH_VALUES):
        _, sends = world.clients[0].ask(kind, range(NUM_KEYS), ones if kind is Kind.PUSH_VALUES else None)
        for send in sends:
            for to, answer in world.servers[0].receive(send.message):
                world.put(("from", to, 0), answer)
    world.settle()
    assert world.clients[0].take_pairs(2).values.unique().tolist() == [1]


def test_keys_with_gaps_in_memory() -> None:
    world = World(spec_of(servers=1), random.Random(0))
    pull = world.ask(0, Kind.PULL_VALUES, torch.arange(NUM_KEYS)[::2])
    world.settle()
    assert len(world.clients[0].take_pairs(pull).keys) == NUM_KEYS // 2


def test_whoever_leaves_at_once_drops_what_could_never_begin() -> None:
    world = World(spec_of(), random.Random(0))
    world.ask(0, Kind.PULL_VALUES, tensor([1]), clock=5)
    world.ask(0, Kind.LEAVE, drops=True)
    meeting = world.ask(1, Kind.MEET)
    world.settle()
    assert world.clients[1].is_done(meeting)


def test_a_number_serves_for_one_connection() -> None:
    world = World(spec_of(servers=1), random.Random(0))
    world.ask(0, Kind.PULL_VALUES, tensor([1]))
    world.settle()
    world.clients[0] = ClientCore(world.spec, 0)
    world.ask(0, Kind.PULL_VALUES, tensor([1]))
    with pytest.raises(UsageError, match="was connected before; a worker's number serves for one connection"):
        world.settle()


def test_the_clock_of_a_range_is_asked_for_by_range() -> None:
    world = World(spec_of(servers=1), random.Random(0))
    ones = torch.ones(3, dtype=torch.float64)
    world.ask(0, Kind.PUSH_VALUES, range(0, 3), ones)
    world.ask(1, Kind.PUSH_VALUES, range(6, 9), ones)
    left, right = (world.ask(0, Kind.PULL_VALUES, keys, clock=1) for keys in (range(0, 3), range(7, 9)))
    world.settle()
    assert not world.clients[0].is_done(left)
    assert not world.clients[0].is_done(right)
    world.ask(1, Kind.PUSH_VALUES, tensor([1]), torch.ones(1, dtype=torch.float64), within=range(0, 5))
    world.settle()
    found = world.clients[0].take_pairs(left)
    assert found.keys.tolist() == [0, 1, 2]
    assert found.values[:, 0].tolist() == [1, 2, 1]
    assert not world.clients[0].is_done(right)
    asked = world.ask(0, Kind.READ_CLOCKS, range(0, NUM_KEYS))
    world.settle()
    assert [(start, stop, dict(clocks)) for start, stop, clocks in world.clients[0].take_clocks(asked)] == [
        (0, 3, {0: 1, 1: 2}),
        (3, 5, {0: 0, 1: 2}),
        (5, 6, {0: 0, 1: 0}),
        (6, 9, {0: 0, 1: 1}),
        (9, 12, {0: 0, 1: 0}),
    ]


def shrink(rows: Tensor, pushed: Tensor, *, by: float) -> None:
    """All rows are halved, and count in their state how often."""
    if by == 0:
        raise ArithmeticError("by 0")
    if by < 0:
        sys.exit(3)
    rows[:, :1] = rows[:, :1] / by + pushed
    rows[:, 1] += 1


class EveryOther(AdmissionRule):
    """A user's: workers take turns."""

    def __init__(self, members: Membership, *, first: int) -> None:
        super().__init__(members)
        self.turn = first
        self.clocks = dict.fromkeys(members.ranks, 0)

    def for_another_shard(self) -> AdmissionRule:
        raise NotImplementedError

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self.clocks[sender] += 1
        self.turn = 1 - sender
        return (sender,)

    def is_held(self, sender: int) -> bool:
        return False

    def is_admitted(self, worker: int) -> bool:
        return worker == self.turn

    def clock_of(self, worker: int) -> int:
        return self.clocks[worker]

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        self.turn = 1 - worker
        return ()


HERE = "tests.unit.test_kv"


def test_a_users_function_sees_its_range_and_a_state_of_its_own() -> None:
    functions = {"shrink": Function(f"{HERE}:shrink", over_range=True, options={"by": 2.0})}
    world = World(spec_of(servers=2, state=1, functions=functions), random.Random(0))
    world.ask(0, Kind.INIT_VALUES, range(4, 8), torch.full((4, 1), 8.0, dtype=torch.float64))
    world.settle()
    world.ask(1, Kind.INIT_VALUES, range(6, 9), torch.full((3, 1), 5.0, dtype=torch.float64))  # 6 and 7 are set
    world.settle()
    began = {4: 8.0, 5: 8.0, 6: 8.0, 7: 8.0, 8: 5.0}
    push = {"function": "shrink", "within": range(5, 9)}
    world.ask(0, Kind.PUSH_VALUES, tensor([6]), torch.ones(1, dtype=torch.float64), **push)
    pull = world.ask(0, Kind.PULL_VALUES, range(0, NUM_KEYS))
    world.settle()
    found = world.clients[0].take_pairs(pull)
    wanted = {key: value if key == 4 else value / 2 + (key == 6) for key, value in began.items()}
    assert dict(zip(found.keys.tolist(), found.values[:, 0].tolist(), strict=True)) == wanted
    assert world.servers[1].rows.read(tensor([7]))[0, 1] == 1


@pytest.mark.parametrize(("by", "error"), [(0, "ArithmeticError: by 0"), (-1, "SystemExit: 3")])
def test_a_function_that_fails_has_changed_nothing_and_is_named(by: int, error: str) -> None:
    functions = {"shrink": Function(f"{HERE}:shrink", options={"by": by})}
    world = World(spec_of(servers=1, state=1, functions=functions), random.Random(0))
    world.ask(0, Kind.PUSH_VALUES, tensor([6]), torch.ones(1, dtype=torch.float64), function="shrink")
    with pytest.raises(UsageError, match=f"server 0: function 'shrink' raised {error}"):
        world.settle()
    assert len(world.servers[0].rows.keys) == 0


def test_a_users_rule_decides_who_goes_on() -> None:
    world = World(spec_of(servers=1, rule=f"{HERE}:EveryOther", rule_options={"first": 1}), random.Random(0))
    one = torch.ones(1, dtype=torch.float64)
    first = [world.ask(0, Kind.PUSH_VALUES, tensor([3]), one) for _ in range(2)]
    world.settle()
    assert not world.clients[0].is_done(first[0])
    world.ask(1, Kind.PUSH_VALUES, tensor([3]), one)
    world.settle()
    assert [world.clients[0].is_done(each) for each in first] == [True, False]
    world.ask(1, Kind.LEAVE)
    world.settle()
    assert world.clients[0].is_done(first[1])


def test_all_meet_and_whoever_has_left_is_not_waited_for() -> None:
    world = World(spec_of(servers=2, workers=3), random.Random(0))
    meetings = [world.ask(worker, Kind.MEET) for worker in (0, 1)]
    world.settle()
    assert not world.clients[0].is_done(meetings[0])
    world.ask(2, Kind.LEAVE)
    world.settle()
    assert world.clients[0].is_done(meetings[0])
    assert world.clients[1].is_done(meetings[1])


def test_a_list_of_keys_goes_over_the_network_once() -> None:
    world = World(spec_of(servers=1, num_keys=MOST_KEYS), random.Random(0))
    keys = torch.arange(0, 1000) * 10**15
    sizes = []
    for _ in range(2):
        _, sends = world.clients[0].ask(Kind.PULL_VALUES, keys)
        sizes.append(sum(send.message.tensor_bytes for send in sends))
        assert all(
            answer.message.kind is Kind.ANSWER for send in sends for answer in world.servers[0].receive(send.message)
        )
    assert sizes == [8000, 0]
