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


@dataclass(frozen=True)
class Form:
    """One all-reduce of whole numbers; a name's next one may be another."""

    name: str
    members: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    op: str
    prescale: float
    is_group: bool

    def input_of(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)) * 1009 + rank)
        return torch.randint(-8, 8, self.shape, generator=generator).to(getattr(torch, self.dtype))

    def wanted(self) -> Tensor:
        stacked = torch.stack([self.input_of(rank) * int(self.prescale) for rank in self.members])
        return stacked.sum(0) if self.op == "Sum" else stacked.amax(0)


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


def run_forms(
    rank: int, steps: list[list[Form]], sets: list[tuple[int, ...]], seed: int
) -> list[list[tuple[Tensor, bool]]]:
    """Ask for this rank's part of each step in an order of its own, and wait in another. Results in the steps' order,
    and whether each is the tensor that it is to be."""
    import paceline.horovod.torch as hvd

    hvd.init()
    process_sets: dict[tuple[int, ...], Any] = {tuple(range(hvd.size())): hvd.global_process_set}
    for members in sets:
        process_sets[members] = hvd.add_process_set(members)
    draw = random.Random(seed * 100 + rank)
    found = []
    for step in steps:
        mine = [form for form in step if rank in form.members]
        asked: dict[int, tuple[Any, Tensor, bool]] = {}
        for number in draw.sample(range(len(mine)), len(mine)):
            form = mine[number]
            tensor, is_in_place = form.input_of(rank), draw.random() < 0.5
            about = {
                "name": form.name + " group" * form.is_group,
                "op": getattr(hvd, form.op),
                "prescale_factor": form.prescale,
                "process_set": process_sets[form.members],
            }
            ask = getattr(hvd, f"{'grouped_' * form.is_group}allreduce_async{'_' * is_in_place}")
            asked[number] = (ask([tensor] if form.is_group else tensor, **about), tensor, is_in_place)
        results: dict[int, tuple[Tensor, bool]] = {}
        for number in draw.sample(range(len(mine)), len(mine)):
            handle, tensor, is_in_place = asked[number]
            result = hvd.synchronize(handle)
            result = result[0] if mine[number].is_group else result
            is_kept = torch.equal(tensor, mine[number].input_of(rank))
            results[number] = (result, result is tensor if is_in_place else is_kept)
        found.append([results[number] for number in range(len(mine))])
    for members in sets:
        assert hvd.remove_process_set(process_sets[members])
    return found
