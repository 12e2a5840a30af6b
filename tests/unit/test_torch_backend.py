"""torch.distributed on Paceline beside torch.distributed on gloo: every operation, on random inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.torch_backend_world import TorchWorld, gloo

Group = Any
Operation = Callable[[Group, torch.Generator], Any]
SLOT_ELEMENTS = 2**20 // 4  # float32 in one staging slot


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchWorld]:
    with TorchWorld(request.param, tmp_path_factory.mktemp("world")) as world:
        yield world


# ---- every operation under both backends -----------------------------------------------------------------------------


def floats(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def integers(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def me(group: Group) -> int:
    return dist.get_rank(group)


def size_of(group: Group) -> int:
    return dist.get_world_size(group)


def all_reduce_small(group: Group, generator: torch.Generator) -> Tensor:
    tensor = floats(generator, 7, 3)
    dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_large(group: Group, generator: torch.Generator) -> Tensor:
    tensor = floats(generator, SLOT_ELEMENTS + 17)
    dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_transposed(group: Group, generator: torch.Generator) -> Tensor:
    tensor = floats(generator, 30, 40).t().contiguous().t()
    dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_each_op(group: Group, generator: torch.Generator) -> list[Tensor]:
    results = []
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    for op, dtype in itertools.product(ops, (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)):
        tensor = floats(generator, 50).to(dtype) if dtype.is_floating_point else integers(generator, 50, dtype=dtype)
        dist.all_reduce(tensor, op, group=group)
        results.append(tensor)
    return results


def all_reduce_bitwise(group: Group, generator: torch.Generator) -> list[Tensor]:
    results = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = integers(generator, 5, 9)
        dist.all_reduce(tensor, op, group=group)
        results.append(tensor)
    return results


def all_reduce_half(group: Group, generator: torch.Generator) -> list[Tensor]:
    """Of numbers whose sums are exact: gloo rounds after every addition, Paceline once."""
    tensors = [integers(generator, 100, dtype=dtype) - 50 for dtype in (torch.float16, torch.bfloat16)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


def all_reduce_complex(group: Group, generator: torch.Generator) -> Tensor:
    tensor = torch.view_as_complex(floats(generator, 20, 2))
    dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_sparse(group: Group, generator: torch.Generator) -> list[Tensor]:
    """Ranks have other numbers of elements, some twice, and the last one none."""
    results = []
    for dtype, shape in ((torch.float32, ()), (torch.float64, (3,)), (torch.int64, (2, 2))):
        count = 0 if me(group) == size_of(group) - 1 else 5 + me(group)
        indices = torch.randint(0, 6, (2, count), generator=generator)
        values = (100 * floats(generator, count, *shape)).to(dtype)
        tensor = torch.sparse_coo_tensor(indices, values, (6, 6, *shape), check_invariants=True)
        dist.all_reduce(tensor, group=group)
        results.append(tensor.to_dense())
    return results


def all_reduce_coalesced(group: Group, generator: torch.Generator) -> list[Tensor]:
    tensors = [floats(generator, length) for length in (3, 40000, 1)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def reduce_to_last(group: Group, generator: torch.Generator) -> Tensor | None:
    tensor = floats(generator, 100)
    dist.reduce(tensor, group_dst=size_of(group) - 1, group=group)
    return tensor if me(group) == size_of(group) - 1 else None


def broadcast(group: Group, generator: torch.Generator) -> list[Tensor]:
    tensors = [floats(generator, 3, 4), integers(generator, 5), torch.rand(6, generator=generator) < 0.5]
    for tensor in tensors:
        dist.broadcast(tensor, group_src=1, group=group)
    return tensors


def all_gather(group: Group, generator: torch.Generator) -> list[Tensor]:
    outputs = [torch.empty(4, 5) for _ in range(size_of(group))]
    dist.all_gather(outputs, floats(generator, 4, 5), group=group)
    return outputs


def all_gather_into_tensor(group: Group, generator: torch.Generator) -> Tensor:
    output = torch.empty(4 * size_of(group), 5)
    dist.all_gather_into_tensor(output, floats(generator, 4, 5), group=group)
    return output


def reduce_scatter(group: Group, generator: torch.Generator) -> Tensor:
    output = torch.empty(6, 2)
    dist.reduce_scatter(output, [floats(generator, 6, 2) for _ in range(size_of(group))], group=group)
    return output


def reduce_scatter_tensor(group: Group, generator: torch.Generator) -> Tensor:
    output = torch.empty(3, 7)
    dist.reduce_scatter_tensor(output, floats(generator, 3 * size_of(group), 7), dist.ReduceOp.MAX, group=group)
    return output


def gather(group: Group, generator: torch.Generator) -> list[Tensor]:
    outputs = [torch.empty(8) for _ in range(size_of(group))]
    dist.gather(floats(generator, 8), outputs if me(group) == 1 else None, group_dst=1, group=group)
    return outputs if me(group) == 1 else []


def scatter(group: Group, generator: torch.Generator) -> Tensor:
    inputs = [floats(generator, 8) for _ in range(size_of(group))]
    output = torch.empty(8)
    dist.scatter(output, inputs if me(group) == 1 else None, group_src=1, group=group)
    return output


def all_to_all_single(group: Group, generator: torch.Generator) -> Tensor:
    output = torch.empty(2 * size_of(group), 3)
    dist.all_to_all_single(output, floats(generator, 2 * size_of(group), 3), group=group)
    return output


def all_to_all_single_uneven(group: Group, generator: torch.Generator) -> Tensor:
    """Rank i sends i + j rows to rank j."""
    rows = [me(group) + other for other in range(size_of(group))]
    output = torch.empty(sum(rows), 2)
    dist.all_to_all_single(output, floats(generator, sum(rows), 2), rows, rows, group=group)
    return output


def send_and_recv(group: Group, generator: torch.Generator) -> list[Tensor]:
    """Everybody sends to rank 0, in turn."""
    tensors = [floats(generator, 1000) for _ in range(size_of(group))]
    for other in range(1, size_of(group)):
        if me(group) == 0:
            dist.recv(tensors[other], group_src=other, group=group)
        elif me(group) == other:
            dist.send(tensors[other], group_dst=0, group=group)
    return tensors


def ring_of_large_messages(group: Group, generator: torch.Generator) -> Tensor:
    incoming = torch.empty(2 * SLOT_ELEMENTS)
    following, previous = (me(group) + 1) % size_of(group), (me(group) - 1) % size_of(group)
    outgoing = floats(generator, 2 * SLOT_ELEMENTS)
    operations = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=following),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=previous),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return incoming


def tags_out_of_order(group: Group, generator: torch.Generator) -> list[Tensor]:
    tensors = [floats(generator, 10) for _ in range(3)]
    if me(group) == 0:
        works = [dist.isend(tensor, group_dst=1, group=group, tag=tag) for tag, tensor in enumerate(tensors)]
        for work in works:
            work.wait()
    elif me(group) == 1:
        for tag in (2, 0, 1):
            dist.recv(tensors[tag], group_src=0, group=group, tag=tag)
    return tensors


def objects(group: Group, generator: torch.Generator) -> str:
    value = {"rank": me(group), "values": integers(generator, 3).tolist()}
    everyone: list[Any] = [None] * size_of(group)
    dist.all_gather_object(everyone, value, group=group)
    from_first = [value, "x" * (10 + me(group))]
    dist.broadcast_object_list(from_first, group_src=0, group=group)
    at_last: list[Any] = [None] * size_of(group)
    is_last = me(group) == size_of(group) - 1
    dist.gather_object(value, at_last if is_last else None, group_dst=size_of(group) - 1, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, everyone if me(group) == 0 else None, group_src=0, group=group)
    return repr([everyone, from_first, at_last, mine])


OPERATIONS: list[Operation] = [
    all_reduce_small,
    all_reduce_large,
    all_reduce_transposed,
    all_reduce_each_op,
    all_reduce_bitwise,
    all_reduce_half,
    all_reduce_complex,
    all_reduce_sparse,
    all_reduce_coalesced,
    reduce_to_last,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all_single,
    all_to_all_single_uneven,
    send_and_recv,
    ring_of_large_messages,
    tags_out_of_order,
    objects,
]


def under_both(rank: int, operation: Operation, seed: int) -> tuple[Any, Any]:
    ours, theirs = (
        operation(group, torch.Generator().manual_seed(100 * seed + rank)) for group in (dist.group.WORLD, gloo[0])
    )
    return ours, theirs


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_gives_what_gloo_gives(world: TorchWorld, operation: Operation) -> None:
    for seed in range(3):
        for ours, theirs in world.run(under_both, operation, seed):
            if operation is objects:
                assert ours == theirs
            else:
                torch.testing.assert_close(ours, theirs, check_stride=False)
