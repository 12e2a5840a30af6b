"""Averages of buckets through codecs, and states that are carried over."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.aggregate import Aggregator, FLTrust, Median
from paceline.buckets import NONFINITE, Bucket
from paceline.codec import BF16, FP16, QSGD, Codec, Int8, OneBit, PowerSGD, RandomK, Sign, TopK, joining
from paceline.comm.base import Collective
from paceline.errors import PeerLost
from paceline.layout import TensorSpec, by_group
from paceline.strategies.coding import Coding
from paceline.strategies.combining import Combining
from paceline.strategies.exchange import Exchange, Messages
from paceline.strategies.own_state import OwnState, carried_over
from tests.unit.collective_harness import World, caught

SIZE, NUM_VALUES, NUM_ROUNDS = 3, 64, 5


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World("shared_memory", SIZE) as world:
        yield world


def values_of(rank: int, number: int) -> Tensor:
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(100 * rank + number))


def averaged_through(
    collective: Collective, codec: Codec | None, poisoned: bool, before: Codec | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """What every round gave, and the memory in the end; a poisoned second round is not finite on rank 0."""
    flat = torch.zeros(NUM_VALUES + 2)
    bucket = Bucket(flat, flat[:NUM_VALUES], flat[NUM_VALUES:])
    exchange = Exchange(collective, [bucket], coding=Coding(codec, before=before) if codec is not None else None)
    rounds = []
    for number in range(NUM_ROUNDS):
        bucket.values.copy_(values_of(collective.rank, number))
        bucket.flags.copy_(torch.tensor([0.0, float(collective.rank)]))
        if poisoned and number == 1 and collective.rank == 0:
            bucket.values[0] = torch.inf
            bucket.flags[NONFINITE] = 1.0
        exchange.start(0, step=number).wait()
        exchange.settle(is_applied=float(bucket.flags[NONFINITE]) == 0)
        rounds.append(flat.clone())
    return rounds, [state.tensor for state in exchange.own_state().values()]


def mean_of(number: int) -> Tensor:
    return torch.stack([values_of(rank, number) for rank in range(SIZE)]).mean(0)


def test_without_a_codec_values_and_flags_are_averaged(world: World) -> None:
    for rounds, memory in world.run(averaged_through, None, False):
        assert not memory
        for number, flat in enumerate(rounds):
            torch.testing.assert_close(flat[:NUM_VALUES], mean_of(number))
            torch.testing.assert_close(flat[NUM_VALUES:], torch.tensor([0.0, 1.0]))


def joined_through(collective: Collective, aggregator: Aggregator, weights: list[float], senders: list[int]) -> Tensor:
    flat = values_of(collective.rank, 0)
    bucket = Bucket(flat, flat, flat[:0])
    exchange = Exchange(collective, [bucket], aggregator=aggregator, senders=senders)
    assert not exchange.completes_alike
    exchange.start(0, weights=weights).wait()
    return flat


def refused_through(collective: Collective, aggregator: Aggregator, senders: list[int]) -> tuple[str, str]:
    name, words, _ = caught(lambda: joined_through(collective, aggregator, [], senders))
    return name, words


def test_an_aggregator_is_given_what_has_a_weight(world: World) -> None:
    """Two of three: the median is their mean."""
    for joint in world.run(joined_through, Median(), [1.5, 0.0, 1.5], [0, 1, 2]):
        torch.testing.assert_close(joint, (values_of(0, 0) + values_of(2, 0)) / 2)


def test_senders_are_ranks_and_not_places(world: World) -> None:
    """Worker 0 is gone, and with it the one that is trusted: nobody is in its place."""
    for name, words in world.run(refused_through, FLTrust(), [1, 2, 5]):
        assert name == "RunFailed"
        assert "trusted=0 has sent nothing; those who have are [1, 2, 5]; workers 1, 2, 5 have" in words
    trusted = world.run(joined_through, FLTrust(trusted=5), [], [1, 2, 5])
    assert all(torch.equal(joint, trusted[0]) for joint in trusted)


@pytest.mark.parametrize("codec", [OneBit(), TopK(ratio=0.1), RandomK(), Sign(), Int8(), QSGD()], ids=str)
def test_a_codec_never_sees_flags(world: World, codec: Codec) -> None:
    """Flags come through as they are, however little is left of values; and all workers get the same."""
    answers = world.run(averaged_through, codec, False)
    for rounds, _ in answers:
        for flat, first in zip(rounds, answers[0][0], strict=True):
            torch.testing.assert_close(flat[NUM_VALUES:], torch.tensor([0.0, 1.0]))
            assert torch.equal(flat, first)


def test_what_half_precision_leaves_out_comes_with_the_next_rounds(world: World) -> None:
    answers = world.run(averaged_through, BF16(), False)
    sent = torch.stack(answers[0][0])[:, :NUM_VALUES].sum(0)
    left = torch.stack([memory[0] for _, memory in answers]).mean(0)
    parts = torch.cat([memory[1] for _, memory in answers])
    wanted = torch.stack([mean_of(number) for number in range(NUM_ROUNDS)]).sum(0)
    torch.testing.assert_close(sent + left + parts, wanted, rtol=0.0, atol=2e-6)


def averaged_by_two_exchanges(collective: Collective, codec: Codec) -> tuple[list[Tensor], list[Tensor]]:
    """What every round gave, and the memory in the end, where another exchange goes on after two rounds; its third
    round is begun by one that does not come to its end."""
    flat = torch.zeros(NUM_VALUES)
    bucket = Bucket(flat, flat, torch.zeros(0))
    exchange, rounds = Exchange(collective, [bucket], coding=Coding(codec)), []
    for number in range(NUM_ROUNDS):
        bucket.values.copy_(values_of(collective.rank, number))
        if number == 2:
            exchange.start(0, step=number).wait()  # by which nobody has gone on
            before, exchange = exchange, Exchange(collective, [bucket], coding=Coding(codec))
            exchange.carry_on(before)
            bucket.values.copy_(values_of(collective.rank, number))
        exchange.start(0, step=number).wait()
        exchange.settle(is_applied=True)
        rounds.append(flat.clone())
    return rounds, [state.tensor for state in exchange.own_state().values()]


@pytest.mark.parametrize("codec", [BF16(), TopK(ratio=0.1), OneBit(), Int8(feedback=True)], ids=str)
def test_what_is_left_out_is_owed_by_the_exchange_among_others(world: World, codec: Codec) -> None:
    answers = world.run(averaged_by_two_exchanges, codec)
    sent = torch.stack(answers[0][0]).sum(0)
    left = torch.stack([memory[0] for _, memory in answers]).mean(0)
    parts = torch.cat([memory[1] for _, memory in answers if len(memory) > 1] or [torch.zeros(NUM_VALUES)])
    wanted = torch.stack([mean_of(number) for number in range(NUM_ROUNDS)]).sum(0)
    torch.testing.assert_close(sent + left + parts, wanted, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("before", [BF16(), TopK(ratio=0.1), OneBit(), Int8(), PowerSGD(start=0)], ids=str)
def test_what_a_codec_leaves_out_comes_through_the_one_that_follows(world: World, before: Codec) -> None:
    """The first two rounds go through the one, the others through the other."""
    answers = world.run(averaged_through, PowerSGD(start=2), False, before)
    sent = torch.stack(answers[0][0])[:, :NUM_VALUES].sum(0)
    left = torch.stack([memory[0] for _, memory in answers]).mean(0)
    wanted = torch.stack([mean_of(number) for number in range(NUM_ROUNDS)]).sum(0)
    if before.feedback:
        torch.testing.assert_close(sent + left, wanted, rtol=0.0, atol=2e-6)
    first = world.run(averaged_through, before, False)[0][0]
    assert all(torch.equal(*pair) for pair in zip(answers[0][0][:2], first[:2], strict=True))


@pytest.mark.parametrize("codec", [BF16(), TopK(ratio=0.1), PowerSGD(start=0)], ids=str)
def test_a_gradient_that_is_not_finite_leaves_the_memory_as_it_was(world: World, codec: Codec) -> None:
    """Rounds go on as if there had been none."""
    poisoned, clean = (world.run(averaged_through, codec, trouble) for trouble in (True, False))
    for (rounds, memory), (_, same) in zip(poisoned, clean, strict=True):
        assert float(rounds[1][NUM_VALUES + NONFINITE]) > 0
        assert all(bool(kept.isfinite().all()) for kept in memory)
        assert bool(torch.stack(rounds[2:]).isfinite().all())
        assert [kept.shape for kept in memory] == [kept.shape for kept in same]


def overflown(collective: Collective) -> tuple[float, list[float]]:
    """The flag after a round that the codec cannot hold, and what is left of it."""
    flat = torch.full((NUM_VALUES + 2,), 1e30)
    bucket = Bucket(flat, flat[:NUM_VALUES], flat[NUM_VALUES:])
    exchange = Exchange(collective, [bucket], coding=Coding(FP16()))
    bucket.flags.zero_()
    exchange.start(0).wait()
    is_finite = float(bucket.flags[NONFINITE]) == 0
    exchange.settle(is_applied=is_finite)
    return float(bucket.flags[NONFINITE]), [float(s.tensor.abs().sum()) for s in exchange.own_state().values()]


def test_a_mean_that_a_codec_cannot_hold_is_not_finite_on_all_workers(world: World) -> None:
    assert world.run(overflown) == [(1.0, [0.0, 0.0])] * SIZE


def combined(collective: Collective) -> tuple[str | None, bool]:
    """Whom Combining blames on this rank, and whether the average is finite, where rank 1's gradient is not."""
    flat = torch.full((NUM_VALUES,), torch.nan if collective.rank == 1 else 1.0)

    def find_nonfinite() -> str | None:
        return None if bool(flat.isfinite().all()) else "weight"

    combining = Combining(collective, [flat], mode="always", find_nonfinite=find_nonfinite)
    combining.after_backward(1.0)
    return combining.culprit, bool(flat.isfinite().all())


def test_an_average_that_is_not_finite_is_blamed_on_the_rank_it_is_of(world: World) -> None:
    assert world.run(combined) == [(None, False), ("weight", False), (None, False)]


def after_two_passes(collective: Collective, reads_after: int | None) -> tuple[bool, set[type]]:
    """Whether gradients are averaged after a step of two passes, after one of which rank 1 reads a gradient, and of
    which classes parameters are in a step that looks closely, and only accumulates."""
    model = nn.Linear(2, 1)
    flats, parameters = [torch.zeros(2), torch.zeros(1)], list(model.parameters())
    combining = Combining(collective, flats, parameters=parameters, mode="auto", find_nonfinite=lambda: None)
    for number in range(2):
        combining.after_backward(1.0)
        if number == reads_after and collective.rank == 1:
            assert model.weight.grad is None
    for number in (1, 2):
        combining.script_is_done()
        combining.before_step(1.0, step=number, is_scaled=False)
        is_combined = combining.take()
        combining.look_closely()
    return is_combined, {type(parameter) for parameter in parameters}


@pytest.mark.parametrize("reads_after", [None, 0, 1])
def test_a_read_after_any_pass_of_the_first_step_counts(world: World, reads_after: int | None) -> None:
    assert world.run(after_two_passes, reads_after) == [(reads_after is not None, {nn.Parameter})] * SIZE


@given(before=st.integers(1, 5), after=st.integers(1, 5), fate=st.sampled_from(["average", "sum", "reset"]))
def test_states_become_what_they_say(before: int, after: int, fate: str) -> None:
    everyone = [{"x": OwnState(torch.tensor([float(rank)]), fate)} for rank in range(before)]  # type: ignore[arg-type]
    tensors, fates = carried_over(everyone, wanted={"x": OwnState(torch.zeros(1))}, size=after)
    total = sum(range(before))
    expected = {"average": [total / before], "sum": [total / after], "reset": None}[fate]
    assert (tensors["x"].tolist() if "x" in tensors else None) == (pytest.approx(expected) if expected else None)
    assert fates == {"x": {"average": "averaged", "sum": "summed", "reset": "reset"}[fate]}


def test_what_all_have_the_same_is_kept_and_held_once() -> None:
    everyone = [{"x": OwnState(torch.ones(1), "same"), "y": OwnState(torch.ones(1), "same")}, {}]
    tensors, fates = carried_over(everyone, wanted={"x": OwnState(torch.zeros(1))}, size=3)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"x": [1.0]}
    assert fates == {"x": "kept", "y": "reset"}


def test_states_that_do_not_fit_are_reset() -> None:
    one, two = OwnState(torch.zeros(1), "average"), OwnState(torch.zeros(2), "average")
    everyone = [
        {"same": one, "shape": one, "missing": one, "unwanted": one},
        {"same": one, "shape": two, "unwanted": one},
    ]
    tensors, fates = carried_over(everyone, wanted={"same": one, "shape": one, "missing": one}, size=2)
    assert set(tensors) == {"same"}
    assert fates == {"same": "averaged", "shape": "reset", "missing": "reset", "unwanted": "reset"}


def left_out(collective: Collective, lost_on: int | None) -> Tensor:
    """After the second round, of which the rank `lost_on` does not hear the last part."""
    flat = torch.zeros(NUM_VALUES)
    bucket = Bucket(flat, flat, flat[:0])
    layout = by_group([TensorSpec("weight", (8, 8), torch.float32)])
    exchange = Exchange(collective, [bucket], coding=Coding(PowerSGD(rank=1, start=0)), layout=layout)
    for number in range(2):
        flat.copy_(values_of(collective.rank, number))
        with pytest.MonkeyPatch.context() as patch:
            if number == 1 and collective.rank == lost_on:
                patch.setattr(Messages, "average", unheard_at(2))
            with contextlib.suppress(PeerLost):
                exchange.start(0, step=number).wait()
        exchange.settle(is_applied=True)
    return exchange.own_state()["exchange.0.left"].tensor


def unheard_at(last: int) -> Callable[[Messages, Tensor], None]:
    """An average that this worker takes part in; it does not hear the one of that number."""
    calls, average = itertools.count(1), Messages.average

    def averaged(messages: Messages, tensor: Tensor) -> None:
        number, own = next(calls), tensor.clone()
        average(messages, own)
        if number == last:
            raise PeerLost("rank 0 is lost")
        tensor.copy_(own)

    return averaged


@pytest.mark.parametrize("lost_on", range(SIZE))
def test_who_is_handed_a_mean_of_low_rank_owes_as_much_as_if_it_had_heard_it(world: World, lost_on: int) -> None:
    heard, handed = world.run(left_out, None), world.run(left_out, lost_on)
    assert all(left.abs().max() > 0.1 for left in heard)
    for left, other_left in zip(heard, handed, strict=True):
        assert torch.equal(left, other_left)


def owed_before_and_after(collective: Collective, _: None) -> tuple[Tensor, Tensor]:
    """The sum of two rounds' means with what is left out then, and what is left out once others are exchanged with."""
    flat = torch.zeros(NUM_VALUES)
    bucket = Bucket(flat, flat, flat[:0])
    coding = Coding(PowerSGD(rank=1, start=9), before=OneBit())
    layout = by_group([TensorSpec("weight", (8, 8), torch.float32)])
    before, after = (Exchange(collective, [bucket], coding=coding, layout=layout) for _ in range(2))
    means = torch.zeros(NUM_VALUES)
    for number in range(2):
        flat.copy_(values_of(collective.rank, number))
        before.start(0, step=number).wait()
        before.settle(is_applied=True)
        means += flat
    after.carry_on(before)
    return means, after.own_state()["exchange.0.left"].tensor


def test_what_the_codec_before_the_first_step_has_left_out_is_owed_among_others_too(world: World) -> None:
    answers = world.run(owed_before_and_after, None)
    left = torch.stack([left for _, left in answers]).mean(0)
    assert left.abs().max() > 0.01
    torch.testing.assert_close(answers[0][0] + left, mean_of(0) + mean_of(1))


@pytest.mark.parametrize("codec", [Int8(), Int8(feedback=False), FP16(), BF16()], ids=str)
def test_several_messages_bring_what_one_does(world: World, codec: Codec) -> None:
    """Payloads larger than a message, of parts whose last one is shorter, and no bit differs."""
    for one, several in zip(
        world.run(averaged_in_pieces, codec, False), world.run(averaged_in_pieces, codec, True), strict=True
    ):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, several, strict=True))


def averaged_in_pieces(collective: Collective, codec: Codec, in_messages: bool) -> list[Tensor]:
    """The means and the memory of several rounds, of 20 pieces of 256 elements, in messages of about two or in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "PIECE_ELEMENTS", 256)
        patch.setattr(joining, "MESSAGE_BYTES", 512 if in_messages else 1 << 20)
        sent: list[int] = []
        start = Messages.start_all_to_all

        def counted(*args: Any) -> Any:
            sent.append(1)
            return start(*args)

        patch.setattr(Messages, "start_all_to_all", counted)
        flat = torch.zeros(20 * 256 - 100)
        bucket = Bucket(flat, flat, flat[:0])
        exchange = Exchange(collective, [bucket], coding=Coding(codec))
        rounds = []
        for number in range(3):
            chance = torch.Generator().manual_seed(10 * number + collective.rank)
            bucket.values.copy_(torch.randn(flat.numel(), generator=chance))
            exchange.start(0, step=number).wait()
            exchange.settle(is_applied=True)
            rounds.append(flat.clone())
        assert len(sent) > 6 if in_messages else len(sent) == 6
        return rounds + [state.tensor for state in exchange.own_state().values()]


class _Broken(Exception):
    pass


@pytest.mark.parametrize("num_starts", [1, 2, 3])
def test_what_is_left_is_kept_before_the_last_message(num_starts: int) -> None:
    """Who breaks off in the midst of its messages has not left out anything, as nobody has its gradient."""
    codec, values = Int8(), torch.randn(8 * 256)
    regions = [joining.Region(0, (values.numel(),))]

    class Peers:
        rank, size, starts = 0, 2, 0

        def average(self, tensor: Tensor) -> None:
            raise AssertionError

        def start_all_to_all(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
            self.starts += 1
            if self.starts > num_starts:
                raise _Broken
            return lambda: list(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "PIECE_ELEMENTS", 256)
        patch.setattr(joining, "MESSAGE_BYTES", 520)
        kept = joining.beginnings(codec, regions, values, rank=0, size=2, seed=0)
        now: dict[str, Tensor] = {}
        with pytest.raises(_Broken):
            joining.join(codec, Peers(), values.clone(), kept, now, regions=regions, path=(0,), seed=0)
    assert ("left" in now) == (num_starts >= 1)
