"""Local updates through codecs: what is sent and what is kept are all there was, and what does not go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.codec import FP16, Codec, Int8, OneBit, Payload, PowerSGD, Shape, TensorCodec, TopK
from paceline.codec.joining import sent_bytes
from paceline.errors import NonFiniteGradient, UsageError
from paceline.outer import Nesterov
from paceline.strategies import build
from paceline.strategies.base import Synchronizer
from paceline.strategies.local_updates import LocalUpdates
from tests.unit.local_rounds import run_alone, shared_after

SHAPES: Sequence[Shape] = ((64, 32), (1024,))


@final
@dataclass(frozen=True, kw_only=True)
class Identity(TensorCodec):
    """Tensors as they are."""

    feedback: ClassVar[bool] = True
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.0, 0.0)

    def num_bytes(self, shape: Shape) -> int:
        return 4 * torch.Size(shape).numel()

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        return (tensor.clone(),)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return payload[0].view(like.shape).clone()


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "alpha": 0.5}, {"post_local_from": 2, "warmup": 2}], ids=str)
def test_a_codec_that_changes_nothing_is_none(options: dict[str, Any]) -> None:
    """To the bit: two workers' changes have one sum, whoever adds them."""
    plain, coded = (
        shared_after(LocalUpdates(every=4, outer=Nesterov(), **options, **more), size=2)
        for more in ({}, {"codec": Identity(), "codec_scope": "all"})
    )
    assert torch.equal(plain, coded)


class Tables(nn.Module):
    """Two tensors, a fragment each."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])


def tables() -> tuple[nn.Module, Optimizer]:
    model = Tables()
    return model, SGD(model.parameters(), lr=1.0)


def pushed(rank: int, number: int, table: int) -> Tensor:
    """A worker's gradient."""
    chance = torch.Generator().manual_seed(10_000 * table + 100 * number + rank)
    return torch.randn(SHAPES[table], generator=chance)


@pytest.mark.parametrize("codec", [TopK(ratio=0.05), Int8(), OneBit(), PowerSGD(rank=2, start=0)], ids=str)
def test_what_was_sent_and_what_is_left_are_all_there_was(codec: Codec) -> None:
    """100 rounds, in which a fragment changes in the step after which it leaves alone. The mean changes that were taken
    off the parameters, what the workers keep, and what was lost of the means add up to all changes."""
    size, num_rounds = 2, 100

    def script(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> list[dict[str, Tensor]]:
        for number in range(num_rounds):
            for leaving in range(len(SHAPES)):
                for table, parameter in enumerate(model.tables):
                    parameter.grad = pushed(rank, number, table) if table == leaving else torch.zeros_like(parameter)
                synchronizer.step(optimizer.step, pause_at=0)
        own = synchronizer.own_state()
        return [
            {name: own[key].tensor for name in ("left", "part") if (key := f"exchange.{table}.{name}") in own}
            | {"sent": -parameter.detach().flatten()}
            for table, parameter in enumerate(model.tables)
        ]

    strategy = LocalUpdates(every=2, fragments=2, codec=codec, codec_scope="all")
    found = run_alone(strategy, size, script, build=tables)
    for table in range(len(SHAPES)):
        wanted = sum(pushed(rank, n, table).double() for rank in range(size) for n in range(num_rounds)) / size
        one, other = (each[table] for each in found)
        reached = one["sent"].double() + (one["left"].double() + other["left"].double()) / size
        if "part" in one:
            reached += torch.cat([one["part"], other["part"]]).double()
        assert torch.equal(one["sent"], other["sent"])
        assert float((reached - wanted.flatten()).abs().max()) <= 1e-6 * float(wanted.abs().max())


@pytest.mark.parametrize("codec", [TopK(ratio=0.05), Int8(), OneBit()], ids=str)
def test_bytes_are_those_of_payloads(codec: Codec) -> None:
    """Of each fragment, once a round; nothing else moves."""
    size, num_rounds = 4, 3

    def script(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> int:
        before = synchronizer.context.collective.timing.moved_bytes
        for _ in range(2 * num_rounds):
            for parameter in model.tables:
                parameter.grad = torch.ones_like(parameter)
            synchronizer.step(optimizer.step, pause_at=0)
        return synchronizer.context.collective.timing.moved_bytes - before

    strategy = LocalUpdates(every=2, fragments=2, codec=codec, codec_scope="all")
    moved = run_alone(strategy, size, script, build=tables)
    assert sum(moved) == size * num_rounds * sum(sent_bytes(codec, [shape], size) for shape in SHAPES)


def overflow(
    rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer, *, only: int | None = None
) -> tuple[float, float]:
    """The first round's change of a worker, or of all, is more than 16 bits hold: what all have after it, and in the
    end."""
    for number in range(4):
        for parameter in model.tables:
            is_large = number < 2 and only in (None, rank)
            parameter.grad = torch.full_like(parameter, 1e6 if is_large else 1.0)
        synchronizer.step(optimizer.step, pause_at=0)
        if number == 1:
            between = float(model.tables[0].detach().max())
    return between, float(model.tables[0].detach().max())


def test_a_change_that_a_codec_does_not_hold() -> None:
    with pytest.raises(
        Exception, match=f"{NonFiniteGradient.__name__}.*codec=fp16 does not hold the change of parameter .*bf16"
    ):
        run_alone(LocalUpdates(every=2, codec=FP16(), codec_scope="all"), 2, overflow, build=tables)
    skipping = LocalUpdates(every=2, codec=FP16(), codec_scope="all", nonfinite="skip")
    assert run_alone(skipping, 2, overflow, build=tables) == [(0.0, -2.0)] * 2


@pytest.mark.parametrize("only", [0, 1])
def test_the_others_changes_count_where_a_codec_does_not_hold_one(only: int) -> None:
    """As where one is not finite: half of the other's change of -2, and then all go on from there."""
    skipping = LocalUpdates(every=2, codec=FP16(), codec_scope="all", nonfinite="skip")
    assert run_alone(skipping, 2, partial(overflow, only=only), build=tables) == [(-1.0, -3.0)] * 2


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("local-sgd", {"codec_scope": "all"}, "no effect without a codec"),
        ("local-sgd", {"codec": "auto:among=sign"}, "codec=sign says which way parameters went and not how far"),
        ("diloco", {"codec": "auto", "delay": "2"}, "hides nothing"),
        ("slowmo", {"codec": "sign"}, "not how far"),
        ("diloco", {"codec": "int8", "delay": "2"}, "hides nothing"),
        ("diloco", {"codec": "int8", "aggregate": "median"}, "leave out codec"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build(name, options)
