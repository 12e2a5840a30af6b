"""A worker whose pushes are coded dies between any two messages, or leaves: what counts is what its codec has sent, and
what that has left out is owed until it is sent, by whoever it is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.aggregate import TrimmedMean
from paceline.codec import TensorCodec
from paceline.codec.base import Payload, Shape
from paceline.elastic import Done
from paceline.membership import Membership
from paceline.messages import Message
from paceline.server.coded_push import PushCoding
from paceline.server.whole_updates import Share
from tests.unit.protocol_net import EPOCH, LAYOUT, LR, RULES, Net, gradient
from tests.unit.test_outlived_by_servers import STEPS, letting_go, lose_some

UNIT = 4


@dataclass(frozen=True, kw_only=True)
class Coarse(TensorCodec):
    """Whole units, so that nothing is rounded here, and all elements of a push keep one value."""

    seconds_per_gbyte = 0.0, 0.0

    @property
    def feedback(self) -> bool:
        return True

    def num_bytes(self, shape: Shape) -> int:
        return 4 * torch.Size(shape).numel()

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        return ((tensor / UNIT).floor().to(torch.int32),)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return (payload[0] * UNIT).to(like.dtype).view(like.shape)


def codings(randomness: random.Random, num_workers: int) -> list[PushCoding]:
    beside = randomness.random() < 0.5
    lefts = [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(num_workers)]
    return [PushCoding(Coarse(), seed=0, left=left, beside=beside) for left in lefts]


def sent_by(worker: int, *, steps: int, leaves_after: int | None) -> tuple[list[float], float]:
    """What one process makes of a worker's gradients: what it sends at each step, and what it owes then."""
    sent, owed = [], 0.0
    for step in range(steps):
        whole = gradient(worker, step) + owed
        sent.append(whole if step + 1 == leaves_after else UNIT * float(whole // UNIT))
        owed = whole - sent[-1]
    return sent, owed


@pytest.mark.parametrize("name", ["bsp", "ssp", "asp", "quorum"])
@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    num_workers=st.integers(2, 3),
    num_servers=st.integers(1, 3),
    near=st.sampled_from([0.0, 0.5, 1.0]),
    dies_after=st.integers(0, 60),
    leaves_after=st.one_of(st.none(), st.integers(1, STEPS)),
)
def test_what_is_left_out_is_sent_once(
    name: str,
    randomness: random.Random,
    num_workers: int,
    num_servers: int,
    near: float,
    dies_after: int,
    leaves_after: int | None,
) -> None:
    """`leaves_after`: the last worker does so after this step, with all that it owes; otherwise it dies."""
    beside = [[randomness.random() < near for _ in range(num_servers)] for _ in range(num_workers)]
    rules = (RULES[name](Membership.first(num_workers)) for _ in range(num_servers))
    coding = codings(randomness, num_workers)
    net = Net(rules, beside, randomness=randomness, piece_bytes=64, outlives_workers=True, coding=coding)
    goes, done = num_workers - 1, Done()
    steps, is_asking = [0] * num_workers, [False] * num_workers
    acting, num_delivered = set(range(num_workers)), 0
    launcher: Generator[None, None, Done] | None = None

    def go_on() -> None:
        for worker in acting:
            client = net.clients[worker]
            if is_asking[worker] and net.is_idle(worker):
                client.require_done()
                client.settle(client.reply())
                is_asking[worker], steps[worker] = False, steps[worker] + 1
            end = leaves_after if worker == goes and leaves_after is not None else STEPS
            if not is_asking[worker] and steps[worker] < end:
                is_last = worker == goes and steps[worker] + 1 == leaves_after
                about = {"done": Done(0, steps[worker] + 1), "is_last": is_last}
                net.push(worker, gradient(worker, steps[worker]), **about)
                is_asking[worker] = True

    go_on()
    while True:
        has_left = leaves_after is not None and steps[goes] == leaves_after
        if goes in acting and (has_left or (leaves_after is None and num_delivered == dies_after)):
            acting.discard(goes)
            launcher = letting_go(net, goes)
            if not has_left:
                lose_some(net, goes, randomness)
        ways: list[tuple[bool, int, int] | None] = [way for way, queue in net.under_way.items() if queue]
        ways += [None] if launcher is not None else []
        if not ways:
            break
        way = randomness.choice(ways)
        if way is not None:
            net.deliver(way, Message.decode(net.under_way[way].popleft(), epoch=EPOCH))
            num_delivered += 1
        elif launcher is not None:
            try:
                next(launcher)
            except StopIteration as end:
                launcher, done = None, end.value
        go_on()
    assert not net.errors
    steps[goes] = steps[goes] if goes in acting else done.own
    for index, server in enumerate(net.servers):
        counted = {(each.worker, each.clock) for each in net.records if each.server == index}
        if name == "quorum":  # of one: each is a round, and clocks are of all rounds
            assert Counter(worker for worker, _ in counted) == Counter(dict(enumerate(steps)))
        else:
            assert counted == {(worker, clock) for worker in range(num_workers) for clock in range(steps[worker])}
        value = 0.0
        for clock in range(STEPS):
            given_ = []
            for worker in (worker for worker in range(num_workers) if steps[worker] > clock):
                is_coded = coding[worker].beside or not beside[worker][index]
                sent, _ = sent_by(worker, steps=STEPS, leaves_after=leaves_after if worker == goes else None)
                given_.append(sent[clock] if is_coded else gradient(worker, clock))
            value -= LR * sum(given_) / (len(given_) if name == "bsp" and given_ else 1)
        tensors = [tensor for part in server.parts for tensor in part.shard.parameters]
        values = {round(float(element), 4) for tensor in tensors for element in tensor}
        assert values | {0.0} == {round(value, 4), 0.0}, "but for what lies between tensors"
    for worker in acting:
        _, owed = sent_by(worker, steps=STEPS, leaves_after=None)
        lefts = {float(left) for view in LAYOUT.views(coding[worker].left) for left in view}
        assert lefts <= {0.0, owed}  # nothing where servers beside take gradients as they are
    if leaves_after is not None and goes not in acting:
        assert not coding[goes].left.any()


def test_some_is_left_out() -> None:
    """Or the test above would say nothing."""
    assert all(sent_by(worker, steps=STEPS, leaves_after=None)[1] for worker in range(3))


@pytest.mark.parametrize("is_last", [False, True], ids=["coded", "of one who is to leave"])
def test_what_stands_in_brings_nothing_of_what_is_owed(is_last: bool) -> None:
    """Of three one has no samples in the second round, and its gradient is the one that the aggregator takes. What is
    sent of the gradients with samples, and what is owed at last, are together these."""
    lefts = [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(3)]
    net = Net(
        [RULES["bsp"](Membership.first(3))],
        [[False]] * 3,
        randomness=random.Random(1),
        piece_bytes=64,
        outlives_workers=True,
        coding=[PushCoding(Coarse(), seed=0, left=left, beside=True) for left in lefts],
        aggregator=TrimmedMean(byzantine=1),
    )

    def ends_round(number: int, *values: float, samples: int, **about: bool) -> float:
        """What the update was made of, where the last worker has so many samples."""
        before = parameter()
        for worker, value in enumerate(values):
            share = Share(1 if worker < 2 else samples, 0, 0, number)
            net.push(worker, value, share=share, done=Done(0, number), **(about if worker == 2 else {}))
        net.run()
        for client in net.clients:
            client.require_done()
            client.settle(client.reply())
        return (before - parameter()) / LR

    def parameter() -> float:
        return float(net.servers[0].parts[0].shard.parameters[0].reshape(-1)[0])

    def owed() -> float:
        return float(LAYOUT.views(lefts[2])[0].reshape(-1)[0])

    assert ends_round(1, 0.0, 400.0, 7.0, samples=1) == pytest.approx(4.0)
    assert owed() == 3.0
    stands_in = 6.0 if is_last else 4.0
    assert ends_round(2, 0.0, 400.0, 6.0, samples=0, is_last=is_last) == pytest.approx(stands_in)
    assert owed() == 3.0
    assert ends_round(3, 0.0, 400.0, 6.0, samples=1, is_last=is_last) == pytest.approx(9.0 if is_last else 8.0)
    assert owed() == (0.0 if is_last else 1.0)
