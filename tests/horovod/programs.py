"""Programs of asynchronous operations, run on every rank in an order of its own, and what should come of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One operation, on some ranks."""

    kind: str
    name: str
    members: tuple[int, ...]
    rows: int = 2
    op: str = "Sum"
    root: int = 0


def input_of(call: Call, rank: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order."""
    seed = sum(map(ord, call.name)) * 1009 + rank
    generator = torch.Generator().manual_seed(seed)
    rows = call.rows + (rank if call.kind == "allgather" else 0)
    if call.kind in ("alltoall", "reducescatter"):
        rows = call.rows * len(call.members)
    return torch.randint(-8, 8, (rows, 3), generator=generator).float()


def group_of(tensor: Tensor) -> list[Tensor]:
    """Tensors of two dtypes, the first dtype on both sides of the other."""
    return [tensor, 2 * tensor.double(), 3 * tensor.flatten()[:1]]


def joined(group: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten().float() for each in group])


def wanted(call: Call, rank: int, *, gone: tuple[int, ...] = ()) -> Tensor:
    """By a loop over the ranks' inputs; those of ranks that have joined, and so are gone, are zeros."""
    place = call.members.index(rank)
    inputs = [input_of(call, each) * (each not in gone) for each in call.members]
    if call.kind == "grouped_allreduce":
        inputs = [joined(group_of(each)) for each in inputs]
    stacked = torch.stack(inputs) if call.kind != "allgather" else torch.empty(0)
    reduced = {
        "Sum": lambda: stacked.sum(0),
        "Average": lambda: stacked.sum(0) / len(inputs),
        "Min": lambda: stacked.amin(0),
        "Max": lambda: stacked.amax(0),
        "Product": lambda: stacked.prod(0),
    }
    match call.kind:
        case "allreduce" | "grouped_allreduce":
            return reduced[call.op]()
        case "allgather":
            return torch.cat(inputs)
        case "broadcast":
            return inputs[call.members.index(call.root)]
        case "alltoall":
            return torch.cat([each.split(call.rows)[place] for each in inputs])
        case _:
            return reduced[call.op]().split(call.rows)[place]


def run(
    rank: int, calls: list[Call], sets: list[tuple[int, ...]], seed: int, *, last: int | None = None
) -> list[Tensor]:
    """Ask for this rank's operations in an order of its own, wait in another; results in the program's order.

    Args:
        last: the calls from here on are not asked for by the first rank, which joins instead.
    """
    import paceline.horovod.torch as hvd

    hvd.init()
    everybody = tuple(range(hvd.size()))
    process_sets: dict[tuple[int, ...], Any] = {everybody: hvd.global_process_set}
    for members in sets:
        process_sets[members] = hvd.add_process_set(members)
    draw = random.Random(seed * 100 + rank)

    def ask(call: Call) -> int:
        about = {"name": call.name, "process_set": process_sets[call.members]}
        tensor: Any = input_of(call, rank)
        if call.kind == "grouped_allreduce":
            tensor = group_of(tensor)
        if call.kind in ("allreduce", "grouped_allreduce", "reducescatter"):
            about["op"] = getattr(hvd, call.op)
        if call.kind == "broadcast":
            about["root_rank"] = call.root
        has_twin = call.kind in ("allreduce", "grouped_allreduce", "broadcast")  # that works in place
        how = "async_" if has_twin and draw.random() < 0.5 else "async"
        handle: int = getattr(hvd, f"{call.kind}_{how}")(tensor, **about)
        return handle

    mine = [number for number, call in enumerate(calls) if rank in call.members]
    results: dict[int, Tensor] = {}
    first, then = (mine, []) if last is None else ([n for n in mine if n < last], [n for n in mine if n >= last])
    for part in (first, then):
        if part is then and last is not None and rank == 0:
            break
        for _ in range(2 if part is first else 1):  # the second time what ranks know is called by numbers
            handles = {number: ask(calls[number]) for number in draw.sample(part, len(part))}
            for number in draw.sample(part, len(part)):
                result = hvd.synchronize(handles[number])
                result = joined(result) if calls[number].kind == "grouped_allreduce" else result
                assert number not in results or torch.equal(results[number], result)
                results[number] = result
    if last is not None:
        assert hvd.join() != 0
    for members in sets:
        assert hvd.remove_process_set(process_sets[members])
    return [results[number] for number in sorted(results)]
