"""Tensors that every process of a test can make for itself, and the naive twins of what collectives do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.base import REDUCE_OPS, ReduceOp
from tests.unit.collective_harness import World

SLOT_ELEMENTS = 2**20 // 4  # float32 in one staging slot of shared memory
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
MOVABLE = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.uint16, torch.float8_e4m3fn)
NO_MEAN = tuple(op for op in REDUCE_OPS if op != "mean")

WORLDS = [("alone", 1), ("shared_memory", 2), ("shared_memory", 3), ("shared_memory", 5), ("gloo", 2), ("gloo", 3)]
_EXAMPLES = {("shared_memory", 2): 20, ("shared_memory", 3): 12, ("shared_memory", 5): 5}


@dataclass(frozen=True)
class Spec:
    """A tensor that every process can make for every rank."""

    seed: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "contiguous"

    def make(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        raw = torch.randint(-6, 7, self.shape, generator=generator)
        if self.dtype.is_complex:
            values = torch.complex(raw.double(), torch.rand(self.shape, generator=generator).double()).to(self.dtype)
        elif self.dtype.is_floating_point and self.dtype.itemsize > 1:
            values = (raw + torch.rand(self.shape, generator=generator)).to(self.dtype)
        else:
            values = raw.to(self.dtype)
        if self.layout == "transposed":
            return values.mT.contiguous().mT if values.dim() > 1 else values
        if self.layout == "strided":
            holder = torch.zeros(*self.shape, 2, dtype=self.dtype)
            holder[..., 1] = values
            return holder[..., 1]
        return values


def specs(dtypes: Sequence[torch.dtype], *, large: bool = True) -> st.SearchStrategy[Spec]:
    """Tensors with any number of elements, none and more than all staging slots hold included."""
    small = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    big = st.sampled_from(
        [(16384,), (16385,), (3, 7001), (70001,), (SLOT_ELEMENTS + 17,), (2 * SLOT_ELEMENTS + 1,), (5, SLOT_ELEMENTS)]
    )
    return st.builds(
        Spec,
        st.integers(0, 999),
        st.sampled_from(dtypes),
        st.one_of(small, small, big) if large else small,
        st.sampled_from(["contiguous", "transposed", "strided"]),
    )


def one_each(size: int, dtype: torch.dtype) -> st.SearchStrategy[list[Spec]]:
    return st.lists(specs((dtype,)), min_size=size, max_size=size)


def check(world: World, strategy: st.SearchStrategy[Any], test: Any) -> None:
    """Run `test(example)` for examples of the strategy, as many as this world is worth."""
    num_examples = _EXAMPLES.get((world.backend, world.size), 8)
    settings(max_examples=num_examples, deadline=None, database=None)(given(strategy)(test))()


def reduce_naively(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """One rank after the other, the whole tensor at a time."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        other = part.to(wide)
        if op in ("sum", "mean"):
            total = total + other
        elif op == "product":
            total = total * other
        else:
            total = torch.minimum(total, other) if op == "min" else torch.maximum(total, other)
    if op == "mean":
        is_exact = not (wide.is_floating_point or wide.is_complex)
        total = total.div(len(parts), rounding_mode="trunc") if is_exact else total / len(parts)
    return total.to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bytes_of(one) == bytes_of(other)


def bytes_of(tensor: Tensor) -> bytes:
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return packed.view(torch.uint8).numpy().tobytes()


def require_same(world: World, got: Tensor, expected: Tensor) -> None:
    if world.backend == "gloo" and (got.is_floating_point() or got.is_complex()):
        torch.testing.assert_close(got, expected)  # gloo adds in another order
    else:
        assert same_bits(got, expected)
