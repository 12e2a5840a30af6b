"""Random sequences of operations that all ranks perform alike, and what each rank is to get from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.base import REDUCE_OPS, Collective, ReduceOp, Work
from tests.unit.collective_examples import FLOATS, INTEGERS, Spec, reduce_naively

KINDS = (
    "all_reduce",
    "broadcast",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "messages",
    "barrier",
)
# Elements: none, one, small, staged in two meetings, more than all slots.
_SIZES = (0, 1, 100, 5000, 40_000, 400_000)


@dataclass(frozen=True)
class Call:
    """One operation, as all ranks know it."""

    kind: str
    seed: int
    dtype: torch.dtype
    num_elements: int
    op: ReduceOp
    root: int

    def tensor(self, rank: int, other: int = 0, *, uneven: bool = False) -> Tensor:
        """What `rank` gives, or gives for rank `other`."""
        num_elements = self.num_elements + (17 * rank + other if uneven else 0)
        return Spec(self.seed, self.dtype, (num_elements,)).make(10 * rank + other)


def random_calls(seed: int, *, size: int, kinds: Sequence[str] = KINDS) -> Iterator[Call]:
    """Endless; the same for the same seed and size."""
    generator = random.Random(seed)
    while True:
        yield Call(
            generator.choice(kinds),
            generator.randrange(1000),
            generator.choice((*FLOATS, *INTEGERS)),
            generator.choices(_SIZES, (1, 2, 6, 4, 2, 1))[0],
            generator.choice(REDUCE_OPS),
            generator.randrange(size),
        )


def start(collective: Collective, call: Call) -> tuple[list[Work], list[Tensor]]:
    """Perform a call, as far as it is not asynchronous; the works under way, and what is to hold the results."""
    rank, size = collective.rank, collective.size
    ranks = range(size)
    match call.kind:
        case "all_reduce":
            tensor = call.tensor(rank)
            return [collective.all_reduce(tensor, op=call.op)], [tensor]
        case "broadcast":
            tensor = call.tensor(rank)
            collective.broadcast(tensor, root=call.root)
            return [], [tensor]
        case "gather":
            return [], collective.gather(call.tensor(rank, uneven=True), root=call.root) or []
        case "scatter":
            given = [call.tensor(rank, other, uneven=True) for other in ranks] if rank == call.root else None
            return [], [collective.scatter(given, root=call.root)]
        case "all_gather":
            return [], collective.all_gather(call.tensor(rank, uneven=True))
        case "reduce_scatter":
            return [], [collective.reduce_scatter([call.tensor(rank, other) for other in ranks], op=call.op)]
        case "all_to_all":
            return [], collective.all_to_all([call.tensor(rank, other, uneven=True) for other in ranks])
        case "messages":
            received = [torch.zeros_like(call.tensor(other, rank)) for other in _others(rank, size)]
            works = [collective.recv(tensor, source=other) for tensor, other in _pairs(received, rank, size)]
            for other in _others(rank, size):
                works.append(collective.send(call.tensor(rank, other), destination=other))
            return works, received
        case _:
            collective.barrier()
            return [], []


def perform(collective: Collective, call: Call) -> list[Tensor]:
    works, results = start(collective, call)
    for work in works:
        work.wait()
    return results


def expected(call: Call, rank: int, size: int) -> list[Tensor]:
    """The naive twin of `perform` on one rank."""
    ranks = range(size)
    twins: dict[str, Callable[[], list[Tensor]]] = {
        "all_reduce": lambda: [reduce_naively([call.tensor(other) for other in ranks], call.op)],
        "broadcast": lambda: [call.tensor(call.root)],
        "gather": lambda: [call.tensor(other, uneven=True) for other in ranks] if rank == call.root else [],
        "scatter": lambda: [call.tensor(call.root, rank, uneven=True)],
        "all_gather": lambda: [call.tensor(other, uneven=True) for other in ranks],
        "reduce_scatter": lambda: [reduce_naively([call.tensor(other, rank) for other in ranks], call.op)],
        "all_to_all": lambda: [call.tensor(other, rank, uneven=True) for other in ranks],
        "messages": lambda: [call.tensor(other, rank) for other in _others(rank, size)],
        "barrier": list,
    }
    return twins[call.kind]()


def _others(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def _pairs(tensors: Sequence[Tensor], rank: int, size: int) -> Iterator[tuple[Tensor, int]]:
    return zip(tensors, _others(rank, size), strict=True)
