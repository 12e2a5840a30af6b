"""Collectives among ranks on several hosts, several of them on one host: shared memory inside, gloo between."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import PrefixStore

from paceline.comm.arguments import flatten
from paceline.comm.base import Collective, Cross, Finished, ReduceOp, Timing, Work
from paceline.comm.hierarchical.host_shares import Division, HostShares
from paceline.comm.hierarchical.stages import Passage, Stages
from paceline.comm.process_group.collective import TorchCollective, connect_gloo
from paceline.comm.process_group.reducing import to_wire
from paceline.comm.rank_errors import FAILURES
from paceline.comm.reduction import require_reducible
from paceline.comm.shared_memory.plans import SMALL_BYTES
from paceline.comm.works import GuardedWork, OwnedWork
from paceline.errors import Aborted, PacelineError, PeerLost, UsageError

_NUM_SLOTS = 64


@final
class HierarchicalCollective(Collective):
    """All-reduces in three stages: the ranks of a host meet, then hosts, then the ranks of a host again.

    Where all hosts have as many ranks, each rank reduces its share of the host's memory, all-reduces that share with
    the ranks of its number on the other hosts, and hands it round its host. So a byte crosses the network as often as
    if a host were one rank, over all ranks' connections (Cho et al., "BlueConnect: decomposing all-reduce for deep
    learning on heterogeneous network hierarchy", MLSys 2019). Elsewhere, and for small tensors, whose time is latency,
    the first rank of a host reduces and sends everything (Jia et al., "Highly scalable deep learning training system
    with mixed-precision", 2018, the hierarchical all-reduce).

    Tensors in memory from `allocate` are reduced where they lie, small ones from anywhere through staging slots. Large
    tensors that lie elsewhere, and all other operations, go through a flat gloo group of the whole world.

    Errors name the world's ranks. The ranks of a host compare what they all-reduce; hosts do not. One thread at a time
    may use a collective, except for `abort`.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        hosts: Sequence[Sequence[int]],
        address: str,
        deadline_s: float | None = 300.0,
        timing: Timing | None = None,
    ) -> None:
        """Meet the other ranks. Collective call.

        Args:
            store: where the ranks find one another; no other group may use its keys.
            hosts: the ranks of each host, every rank of the world once.
            address: IP address of this host on the network to be used.
            timing: where to go on counting, for ranks that had another collective before.

        Raises:
            UsageError: the hosts do not hold every rank once, or no network interface of this host has the address.
            PeerLost, DeadlineExceeded: another rank is gone or did not come.
        """
        self.rank = rank
        self.size = sum(len(host) for host in hosts)
        self._host = _host_of(rank, hosts, size=self.size)
        local_rank = self._host.index(rank)
        self._is_even = len({len(host) for host in hosts}) == 1
        self.timing = timing or Timing()
        before = replace(self.timing)
        self._failure: PacelineError | None = None

        def connect(name: str, ranks: Sequence[int]) -> TorchCollective:
            return connect_gloo(
                PrefixStore(name, store),
                rank=ranks.index(rank),
                size=len(ranks),
                address=address,
                deadline_s=deadline_s,
                names=ranks,
            )

        with ExitStack() as opened:  # closes again what is open if the rest cannot be had
            self._world = opened.enter_context(closing(connect("world", range(self.size))))
            partners = [host[local_rank] for host in hosts] if self._is_even or local_rank == 0 else []
            self._across = None
            if partners:
                self._across = opened.enter_context(closing(connect(f"across-{local_rank}", partners)))
            self._shares = opened.enter_context(
                closing(
                    HostShares(
                        rank=local_rank,
                        ranks=self._host,
                        gather=self._gather_on_host,
                        meet=self._world.barrier,
                        deadline_s=deadline_s,
                    )
                )
            )
            self._stages = Stages(self._shares, self._across, size=self.size)
            self._slots = self._shares.allocate(_NUM_SLOTS * SMALL_BYTES).view(_NUM_SLOTS, SMALL_BYTES)
            opened.pop_all()
        self._timings = [before, self._shares.timing, *(group.timing for group in self._groups())]
        self._slot_users: list[Work] = [Finished()] * _NUM_SLOTS
        self._num_staged = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """As `SharedMemoryCollective.allocate`; every rank of the host maps the tensor."""
        if num_bytes <= 0:
            raise ValueError(f"an allocation needs at least one byte, not {num_bytes}")
        self.require_equal("the size of an allocation", num_bytes)
        with self._failing():
            try:
                return self._shares.allocate(num_bytes)
            except OSError as error:
                self._end(Aborted(f"allocation failed: {error}"))
                raise

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        """As `Collective.all_reduce`. The tensor must not be touched until the work is over, which raises
        TensorMismatch if ranks of this host disagree on operation, dtype, size or place."""
        self._check()
        require_reducible(op, tensor.dtype)
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        to_wire(flat[:0], op)  # raises for what gloo cannot reduce, before anyone has begun
        if flat.numel() == 0:
            return Finished()
        is_small = flat.nbytes <= SMALL_BYTES
        division = self._shares.divide(flat, op, is_led=is_small or not self._is_even)
        if division is not None:
            return self._start(division, copy_back)
        if is_small:
            return self._reduce_in_slot(flat, op, copy_back)
        with self._failing():
            return GuardedWork(self._world.all_reduce(tensor, op=op), self._failing)

    def mean_across(self, tensor: Tensor, cross: Cross, *, is_whole: bool) -> Callable[[], Work]:
        division = self._shares.divide(tensor, "mean", is_led=is_whole or not self._is_even)
        if division is None:
            raise UsageError("only memory from allocate is averaged within hosts first")
        holds_some = self._across is not None and division.total.numel() > 0
        prepared = cross(self._across, division.total) if holds_some and self._across is not None else None

        def start() -> Work:
            self._check()
            with self._failing():
                return OwnedWork(self, self._stages.submit(division, None, prepared))

        return start

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        with self._among_all() as world:
            world.broadcast(tensor, root=root)

    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor] | None:
        with self._among_all() as world:
            return world.gather(tensor, root=root)

    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        with self._among_all() as world:
            return world.scatter(tensors, root=root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        with self._among_all() as world:
            return world.all_gather(tensor)

    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        with self._among_all() as world:
            return world.reduce_scatter(tensors, op=op)

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        """As `Collective.send`; over gloo on the same host too, since gloo alone sends on while a rank waits."""
        with self._failing():
            return GuardedWork(self._world.send(tensor, destination=destination), self._failing)

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        with self._failing():
            return GuardedWork(self._world.recv(tensor, source=source), self._failing)

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with self._among_all() as world:
            return world.all_to_all(tensors)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1)).wait()

    def set_deadline(self, deadline_s: float | None) -> None:
        self._shares.set_deadline(deadline_s)
        for group in self._groups():
            group.set_deadline(deadline_s)

    def abort(self, reason: str) -> None:
        self._end(Aborted(reason))

    def lose(self, reason: str) -> None:
        self._end(PeerLost(reason))

    def close(self) -> None:
        """Leave. Peers that still wait for this rank raise; allocated tensors stay readable here."""
        self._end(UsageError("it was closed"))
        self._stages.close()
        self._shares.close()
        for group in self._groups():
            group.close()

    def poll(self, passage: Passage) -> bool:
        """Move what is under way on, without blocking; whether `passage` is over."""
        if not passage.is_over:
            with self._failing():
                self._stages.advance()
        return passage.is_over

    def wait(self, passage: Passage) -> None:
        if not passage.is_over:
            with self._failing():
                self._stages.wait(passage)

    @contextmanager
    def _among_all(self) -> Iterator[TorchCollective]:
        """The flat group, for an operation that blocks. All-reduces end first: nothing would move them on meanwhile."""
        with self._failing():
            self._stages.finish()
            yield self._world

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End the collective, here and for the other ranks of the host, with what fails inside."""
        self._check()
        try:
            yield
        except FAILURES as error:
            self._check()  # an abort shows as the failure of whatever it broke
            self._end(error)
            raise
        finally:
            self._sum_up()

    def _start(self, division: Division, finish: Callable[[], None] | None) -> Work:
        with self._failing():
            return OwnedWork(self, self._stages.submit(division, finish))

    def _reduce_in_slot(self, flat: Tensor, op: ReduceOp, copy_back: Callable[[], None] | None) -> Work:
        """Reduce a small tensor that lies elsewhere in memory that the host shares."""
        number = self._num_staged % _NUM_SLOTS
        self._num_staged += 1
        self._slot_users[number].wait()
        slot = self._slots[number, : flat.nbytes].view(flat.dtype)
        slot.copy_(flat)
        division = self._shares.divide(slot, op, is_led=True)
        assert division is not None  # slots are allocated memory

        def finish() -> None:
            flat.copy_(slot)
            if copy_back is not None:
                copy_back()

        work = self._slot_users[number] = self._start(division, finish)
        return work

    def _gather_on_host(self, tensor: Tensor) -> list[Tensor]:
        everywhere = self._world.all_gather(tensor)
        return [everywhere[rank] for rank in self._host]

    def _sum_up(self) -> None:
        self.timing.communication_s = sum(timing.communication_s for timing in self._timings)
        self.timing.waiting_s = sum(timing.waiting_s for timing in self._timings)
        self.timing.moved_bytes = sum(timing.moved_bytes for timing in self._timings)

    def _groups(self) -> list[TorchCollective]:
        return [self._world] if self._across is None else [self._across, self._world]

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)  # a new one: its frames hold operations

    def _end(self, error: PacelineError) -> None:
        """End all parts of the collective; the first reason stays."""
        if self._failure is not None:
            return
        self._failure = type(error)(f"this collective is unusable since: {error}")
        self._shares.leave(error)
        for group in self._groups():
            group.abort(str(error))


def _host_of(rank: int, hosts: Sequence[Sequence[int]], *, size: int) -> tuple[int, ...]:
    ranks = sorted(each for host in hosts for each in host)
    if ranks != list(range(size)) or not 0 <= rank < size:
        raise UsageError(f"hosts must hold each of ranks 0 to {size - 1} once, not {[list(host) for host in hosts]}")
    return next(tuple(host) for host in hosts if rank in host)
