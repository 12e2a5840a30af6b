"""Gossip through codecs: closed forms without an engine, and what does not go together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.codec import DCT, FP16, Codec, Int8, OneBit, SharedEstimate, TensorCodec, TopK
from paceline.errors import UsageError
from paceline.layout import TensorSpec, by_group
from paceline.pieces import named
from paceline.strategies import build
from paceline.strategies.gossip import Gossip
from paceline.strategies.gossip.averaging import Averaging
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.gossip.shared_estimates import SharedEstimates
from paceline.topology import Hypercube, OnePeerExponential, Ring, Star, Topology
from tests.unit.test_coded_rounds import Identity
from tests.unit.test_gossip_mixers import exchange

SIZE, SHAPE = 8, (32, 64)
LAYOUT = by_group([TensorSpec("x", SHAPE, torch.float32), TensorSpec("y", (5,), torch.float32)])


def starts() -> Tensor:
    """A worker's values in a row."""
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(SIZE, Parcel(LAYOUT).values[0].numel(), generator=chance)
    for row in values:
        LAYOUT.segments[0].zero_padding(row)
    return values


def world(kind: Any, topology: Topology, values: Tensor) -> list[Mixer]:
    mixers = []
    for rank, own_values in enumerate(values):
        own = Parcel(LAYOUT)
        own.values[0].copy_(own_values)
        mixers.append(kind(topology, own, rank=rank, size=len(values)))
    return mixers


def coded(codec: TensorCodec, consensus_step: float) -> Any:
    return partial(SharedEstimates, codec=codec, seed=3, consensus_step=consensus_step)


def values_of(mixers: list[Mixer]) -> Tensor:
    return torch.stack([mixer.own.values[0] for mixer in mixers])


def test_a_codec_that_changes_nothing_takes_the_weighted_mean() -> None:
    """To the bit, where nothing is rounded: whole numbers times 1024, and weights of a quarter."""
    values = (1024 * starts()).round() * 1024
    plain, through = (world(kind, Hypercube(), values) for kind in (Averaging, coded(Identity(), 1.0)))
    for step in range(5):
        exchange(plain, step)
        exchange(through, step)
        assert torch.equal(values_of(plain), values_of(through))
    assert float((values_of(plain) - values.mean(0)).abs().max()) < 0.1 * float(values.abs().max())


def naive(codec: TensorCodec, topology: Topology, x: Tensor, num_steps: int, *, consensus_step: float) -> Tensor:
    """Algorithm 2 with all estimates in one table."""
    weights, estimates = topology.matrix(0, SIZE), torch.zeros_like(x)
    for _ in range(num_steps):
        sent = [codec.decode(codec.encode(left, seed=0), left, seed=0) for left in x - estimates]
        estimates = estimates + torch.stack(sent)
        x = x + consensus_step * ((weights.to(x.dtype) - torch.eye(SIZE)) @ estimates)
        for row in x:
            LAYOUT.segments[0].zero_padding(row)
    return x


@pytest.mark.parametrize(("codec", "consensus_step"), [(TopK(ratio=0.1), 0.2), (OneBit(), 1.0), (Int8(), 1.0)], ids=str)
@pytest.mark.parametrize("topology", [Ring(), Star()], ids=str)
def test_it_is_its_algorithm_and_keeps_the_mean(topology: Topology, codec: TensorCodec, consensus_step: float) -> None:
    mixers = world(coded(codec, consensus_step), topology, starts())
    for step in range(4):
        exchange(mixers, step)
    found = values_of(mixers)
    expected = naive(codec, topology, starts(), 4, consensus_step=consensus_step)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.mean(0), starts().mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("codec", "least"),
    [
        (Int8(), 1e-4),
        (Int8(scales="rows"), 1e-4),
        (OneBit(), 0.1),
        (TopK(ratio=0.2), 1e-3),
        (DCT(edge=8, keep=8), 1e-2),
    ],
    ids=str,
)
def test_workers_agree_in_the_end_though_little_is_sent(codec: TensorCodec, least: float) -> None:
    """With the consensus step that `auto` gives."""
    step = Gossip(topology=Ring(), codec=codec, codec_scope="all").step_of(codec)
    mixers = world(coded(codec, step), Ring(), starts())
    for number in range(100):
        exchange(mixers, number)
    found, mean = values_of(mixers), starts().mean(0)
    assert float((found - mean).norm() / (starts() - mean).norm()) < least


def test_a_message_is_as_large_as_its_payload() -> None:
    count = Parcel(LAYOUT).values[0].numel()
    for codec in (Int8(), OneBit(), TopK(ratio=0.1)):
        mixer = world(coded(codec, 1.0), Ring(), starts())[0]
        sizes = {message.buffer.numel() for message in mixer.outgoing(0).values()}
        assert sizes == {codec.num_bytes((count,))}


def test_codecs_that_contract_leave_out_less_than_there_is() -> None:
    """And those that do not are not given feedback."""
    kinds: dict[str, type[Codec]] = named(Codec)  # type: ignore[type-abstract]
    tensor = starts()[0][:2048].view(SHAPE)
    for name, kind in kinds.items():
        codec = kind()
        assert codec.contracts or not codec.feedback, name
        if isinstance(codec, TensorCodec):
            left = tensor - codec.decode(codec.encode(tensor, seed=0), tensor, seed=0)
            assert (float(left.norm()) < float(tensor.norm())) or not codec.contracts, name


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gossip", {"codec": "random-k"}, "leave out more than there is"),
        ("gossip", {"codec": "sign"}, "leave out more than there is"),
        ("gossip", {"codec": "powersgd"}, "nobody hears everybody"),
        ("d-psgd", {"codec": "auto:among=powersgd+qsgd"}, "codec=powersgd averages among all workers"),
        ("gossip", {"codec": "int8", "mode": "relay", "topology": "chain"}, "mode=relay hands sums of models on"),
        ("gossip", {"codec": "int8", "mode": "push-sum"}, "mode=push-sum sends parts of sums"),
        ("gossip", {"codec": "int8", "mode": "running-sums"}, "mode=running-sums sends sums that grow"),
        ("sgp", {"codec": "int8"}, "sgp has no option codec: it sends parts of sums"),
        ("relay", {"codec": "int8"}, "relay has no option codec: it hands sums of models on"),
        ("ad-psgd", {"codec": "int8"}, "ad-psgd has no option codec: it takes the mean with whom it meets"),
        ("gossip", {"consensus_step": "0.5"}, "no effect without a codec"),
        ("gossip", {"codec_scope": "all"}, "no effect without a codec"),
        ("gossip", {"codec": "int8", "consensus_step": "2"}, "above 0 and at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build(name, options)


def test_links_that_change_are_refused() -> None:
    with pytest.raises(UsageError, match="a worker has to hear every message"):
        Gossip(topology=OnePeerExponential(), codec=Int8()).check(num_workers=8)


def test_difference_beyond_what_a_codec_holds_arrives_with_the_next_ones() -> None:
    """fp16 ends at 65504, and would say infinity. Neighbours then believe of the sender what it believes itself."""
    memory, codec = SharedEstimate(), FP16()
    model = torch.tensor([150_000.0, -70_000.0, 1.0])
    estimate = heard = memory.start(model)
    assert heard is not None
    for number in range(3):
        encoded = memory.encode(codec, model, estimate, seed=number)
        estimate, heard = encoded.memory, memory.heard(codec, encoded.payload, heard, seed=number)
        assert estimate is not None
        assert heard.isfinite().all()
        assert torch.equal(estimate, heard)
    torch.testing.assert_close(heard, model, rtol=1e-3, atol=0.0)


def test_model_that_is_not_finite_is_not_told_to_be() -> None:
    encoded = SharedEstimate().encode(FP16(), torch.tensor([torch.inf, torch.nan, 1.0]), None, seed=0)
    assert encoded.payload[0].isfinite().tolist() == [False, False, True]


def test_only_halves_have_a_largest_element() -> None:
    """What a byte of a block holds is no bound of the elements, which its scale brings there."""
    assert [kind().largest for kind in (FP16, Int8)] == [65504.0, torch.inf]
    wide = torch.tensor([1e6, -3e5])
    decoded = Int8().decode(Int8().encode(wide, seed=0), wide, seed=0)
    torch.testing.assert_close(decoded, wide, rtol=2e-2, atol=0.0)
