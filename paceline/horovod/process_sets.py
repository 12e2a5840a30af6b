"""Sets of ranks that run operations among themselves."""

from collections.abc import Iterable, Sequence
from typing import Any, final

from paceline.horovod.runtime import GLOBAL, runtime


@final
class ProcessSet:
    """Some of the ranks. It can be used once `init` or `add_process_set` has been given it.

    Args:
        ranks_or_comm: ranks. An MPI communicator is refused, as there is no MPI here.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: None = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError("a ProcessSet is made of a list of ranks; MPI communicators are for Horovod with MPI")
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of a list of ranks, which are whole numbers, not {ranks}")
        self.ranks = ranks

    def size(self) -> int | None:
        """How many ranks it has; None before it is initialized."""
        return None if self.process_set_id is None else len(runtime().ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """This process's place in it; None before it is initialized. Raises ValueError where it has none."""
        if self.process_set_id is None:
            return None
        ranks = runtime().ranks_of(self.process_set_id)
        if runtime().rank not in ranks:
            raise ValueError(f"rank {runtime().rank} does not belong to {self}")
        return ranks.index(runtime().rank)

    def included(self) -> bool | None:
        """Whether this process belongs to it; None where its ranks are not known."""
        return None if self.ranks is None else runtime().rank in self.ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = GLOBAL


def enter(process_sets: Sequence[ProcessSet]) -> None:
    """Initialize those that `init` was given, and tell the global one its ranks. Collective call."""
    global_process_set.ranks = list(runtime().ranks_of(GLOBAL))
    for process_set in process_sets:
        assert process_set.ranks is not None
        process_set.process_set_id = runtime().add_set(process_set.ranks)


def add_process_set(process_set: "ProcessSet | Sequence[int]") -> ProcessSet:
    """Initialize a process set. Collective call of all ranks. Raises ValueError if there is one of the same ranks."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    assert added.ranks is not None
    added.process_set_id = runtime().add_set(added.ranks)
    if added.process_set_id is None:
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a process set, which cannot be used any more; whether there was one. Collective call of all ranks."""
    number: Any = process_set.process_set_id
    if number is None or number == GLOBAL:
        return False
    process_set._invalidate()
    return runtime().remove_set(number) is not None
