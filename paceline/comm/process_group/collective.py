"""Collectives over torch.distributed: gloo between hosts, NCCL between GPUs."""

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Store

from paceline.comm.algorithms.chain import chain, is_worth_a_chain
from paceline.comm.arguments import timeout_of
from paceline.comm.base import ReduceOp, Timing, Work
from paceline.comm.byte_collective import ByteCollective
from paceline.comm.helper import Helper
from paceline.comm.hosts import interface_with, nccl_interface
from paceline.comm.process_group.calls import TorchCalls, WatchedMessage
from paceline.comm.process_group.connections import LISTENER_BYTES, Connections, Endpoint, listeners, pack_listener
from paceline.comm.process_group.ending import destroy
from paceline.comm.process_group.peer_watch import PeerWatch
from paceline.comm.process_group.reducing import from_wire, options_for, to_wire
from paceline.comm.rank_errors import disagreement
from paceline.comm.reduction import Reduction, require_reducible
from paceline.comm.signature import Signature
from paceline.errors import Aborted, DeadlineExceeded, PacelineError, PeerLost

# A backend that times out closes its connections, and then peers would blame the first to give up.
_BACKEND_MARGIN_S = 10.0


@final
class TorchCollective(ByteCollective):
    """Operations of a torch.distributed process group, gloo or NCCL, under Paceline's rules.

    All blocked time counts as communication: the backends do not tell it from waiting. `wait` blocks this thread until
    the result is in place, with NCCL too, so that every wait has a deadline. After any error every later call raises.

    Errors name the rank that is lost, missing or disagrees. Ranks compare operation, root, dtype and size the first
    time that one of them asks for that, and dtypes and sizes in every call of operations other than all-reduce. If
    ranks mix up all-reduces that were all agreed on before, gloo ends their processes: to compare every time would
    double the time of a 12 KB all-reduce. A message of another dtype or size than its receiver awaits never arrives
    over gloo; over NCCL what happens is undefined.

    NCCL passes the messages between two ranks in the order of the calls, both ways together: of two ranks that exchange
    tensors one must send first and the other receive first.
    """

    def __init__(
        self,
        group: Any,
        *,
        device: torch.device,
        address: str,
        deadline_s: float | None,
        names: Sequence[int] | None = None,
        timing: Timing | None = None,
        listener: Endpoint | None = None,
    ) -> None:
        """Take over the group of a backend from `connect_gloo` or `connect_nccl`. Collective call.

        Args:
            listener: where the group awaits its peers, if that is known.
        """
        self.rank = group.rank()
        self.size = group.size()
        self.timing = timing or Timing()
        self._group = group
        self._is_closed = False
        self._is_nccl = group.name().lower() == "nccl"
        self.can_receive_first = not self._is_nccl
        self.device = device
        self._ways: dict[str, Helper] = {}
        self._names = names or range(self.size)
        self._listener = pack_listener(listener)
        self._connections = Connections(())
        watch = PeerWatch.meet(
            self._exchange_addresses, rank=self.rank, address=address, deadline_s=deadline_s, names=self._names
        )
        self._calls = TorchCalls(watch, timing=self.timing, deadline_s=deadline_s, is_nccl=self._is_nccl)
        self.set_deadline(deadline_s)

    def allocate(self, num_bytes: int) -> Tensor:
        """As `Collective.allocate`; plain memory, on this rank's GPU with NCCL."""
        self._calls.check()
        if num_bytes <= 0:
            raise ValueError(f"an allocation needs at least one byte, not {num_bytes}")
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        """As `Collective.all_reduce`. It stages a tensor of another device through a copy. Raises TypeError if the
        dtype cannot be reduced."""
        require_reducible(op, tensor.dtype)
        tensor = tensor.detach()
        here = tensor.to(self.device)
        wire = to_wire(here, op)
        options = options_for(op, tensor.dtype)

        def finish() -> None:
            from_wire(wire, here, op, size=self.size)
            if here is not tensor:
                tensor.copy_(here)

        num_bytes = 2 * (self.size - 1) * wire.nbytes // self.size
        return self._calls.submit(
            _all_reduce_of(op, tensor.dtype, tensor.numel()),
            lambda: self._group.allreduce([wire], options),
            num_bytes=num_bytes,
            finish=finish,
        )

    def broadcast_bytes(self, signature: Signature, raw: Tensor, root: int) -> None:
        """Compares the whole signature first: gloo ends a process that gets more than it has room for."""
        mine = torch.frombuffer(bytearray(signature.raw), dtype=torch.uint8).to(self.device)
        told = [theirs.cpu().numpy().tobytes() for theirs in self._gather_all(signature, mine, [len(mine)] * self.size)]
        if any(theirs != signature.raw for theirs in told):
            said = [str(Signature.unpack(theirs)) for theirs in told]
            self.fail(disagreement(dict(zip(self._names, said, strict=True))))
        if not self._is_nccl and is_worth_a_chain(raw.numel(), size=self.size):  # NCCL's own is a pipeline already
            chain(self, raw, root=root)
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._run(signature, lambda: self._group.broadcast([raw], options), raw.numel())

    def gather_bytes(
        self, signature: Signature, raw: Tensor, lengths: Sequence[int], *, root: int | None
    ) -> list[Tensor] | None:
        if root is None:
            return self._gather_all(signature, raw, lengths)
        # The backends' own gathers take tensors of one length.
        outgoing = [raw if rank == root else raw[:0] for rank in range(self.size)]
        incoming = lengths if self.rank == root else [0] * self.size
        received = self.exchange_bytes(signature, outgoing, incoming, longest=max(lengths))
        return received if self.rank == root else None

    def exchange_bytes(
        self, signature: Signature, outgoing: Sequence[Tensor], lengths: Sequence[int], *, longest: int
    ) -> list[Tensor]:
        sent, received = [raw.numel() for raw in outgoing], list(lengths)
        whole = torch.cat(list(outgoing))
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self.device)
        self._run(
            signature,
            lambda: self._group.alltoall_base(incoming, whole, received, sent, dist.AllToAllOptions()),
            sum(sent) + sum(received) - sent[self.rank] - received[self.rank],
        )
        # A copy each: a part of `incoming` need not be aligned for its dtype.
        return [part.clone() for part in torch.split_with_sizes(incoming, received)]

    def reduce_bytes(self, signature: Signature, outgoing: Sequence[Tensor], reduction: Reduction, out: Tensor) -> None:
        longest = max(raw.numel() for raw in outgoing)
        parts = self.exchange_bytes(signature, outgoing, [out.nbytes] * self.size, longest=longest)
        reduction([part.view(out.dtype) for part in parts], out)

    def fail(self, error: PacelineError) -> NoReturn:
        self._calls.fail(error)

    def send_bytes(self, signature: Signature, raw: Tensor, destination: int) -> Work:
        return self._message(
            "send to", destination, signature, raw, lambda tag: self._group.send([raw], destination, tag), None
        )

    def recv_bytes(self, signature: Signature, raw: Tensor, source: int, finish: Callable[[], None] | None) -> Work:
        return self._message(
            "recv from", source, signature, raw, lambda tag: self._group.recv([raw], source, tag), finish
        )

    def barrier(self) -> None:
        one = torch.zeros(1, device=self.device)
        self._run(Signature("barrier"), lambda: self._group.allreduce([one], dist.AllreduceOptions()), 0)

    def set_deadline(self, deadline_s: float | None) -> None:
        self._calls.deadline_s = deadline_s
        if hasattr(self._group, "_set_default_timeout"):
            margin_s = None if deadline_s is None else deadline_s + _BACKEND_MARGIN_S
            self._group._set_default_timeout(timeout_of(margin_s))

    def abort(self, reason: str) -> None:
        self._calls.leave(Aborted(reason))

    def lose(self, reason: str) -> None:
        self._calls.leave(PeerLost(reason))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            is_under_way = self._calls.is_under_way
            if is_under_way:
                self._connections.end()
            self._calls.close()
            for way in self._ways.values():
                way.close(joins=False)
            self._group.shutdown()
            held, self._group = [self._group], None
            if is_under_way:
                destroy(held)

    def _run(self, signature: Signature, start: Callable[[], Any], num_bytes: int) -> None:
        self._calls.submit(str(signature), start, num_bytes=num_bytes).wait()

    def _message(
        self,
        way: str,
        other: int,
        signature: Signature,
        raw: Tensor,
        start: Callable[[int], Any],
        finish: Callable[[], None] | None,
    ) -> Work:
        # Only tensors of one form share a tag: gloo ends a process that gets more than it has room for.
        tag = zlib.crc32(f"{signature.dtype} {signature.num_elements}".encode()) & 0x7FFFFFFF
        return self._calls.submit_message(
            f"{way} rank {other} of {signature}",
            lambda: self._watched(start(tag), f"{way} {other}"),
            peer=self._names[other],
            is_sent=way == "send to",
            num_bytes=raw.numel(),
            finish=finish,
        )

    def _watched(self, work: Any, way: str) -> Any:
        """A message's work as one that can be asked whether it is over, in the order of the messages on this way."""
        if self._is_nccl:
            return work
        if way not in self._ways:
            self._ways[way] = Helper(way)
        message = WatchedMessage(work)
        self._ways[way].call(message.watch)
        return message

    def _exchange_addresses(self, mine: bytes) -> list[bytes]:
        """Exchange these addresses, and with them those of the group's own listeners."""
        raw = torch.frombuffer(bytearray(self._listener + mine), dtype=torch.uint8).to(self.device)
        gathered = [torch.empty_like(raw) for _ in range(self.size)]
        self._group.allgather([gathered], [raw], AllgatherOptions()).wait()
        told = [theirs.cpu().numpy().tobytes() for theirs in gathered]
        self._connections = Connections([each[:LISTENER_BYTES] for each in told])
        return [each[LISTENER_BYTES:] for each in told]

    def _gather_all(self, signature: Signature, raw: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Every rank's bytes, padded on their way: the backends' own all-gathers take tensors of one length."""
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: raw.numel()].copy_(raw)
        gathered = [torch.empty_like(padded) for _ in lengths]
        if longest:
            self._run(
                signature,
                lambda: self._group.allgather([gathered], [padded], AllgatherOptions()),
                longest * (self.size - 1),
            )
        return [theirs[:length] for theirs, length in zip(gathered, lengths, strict=True)]


def connect_gloo(
    store: Store,
    *,
    rank: int,
    size: int,
    address: str,
    deadline_s: float | None = 300.0,
    names: Sequence[int] | None = None,
    timing: Timing | None = None,
) -> TorchCollective:
    """Meet the other ranks over gloo. Collective call.

    Args:
        store: where the ranks find one another; no other group may use its keys, so give a `dist.PrefixStore`.
        address: IP address of this host on the network to be used. No host name is looked up.
        names: what errors call the ranks, where that is not their numbers here.
        timing: where to go on counting, for ranks that had another collective before.

    Raises:
        UsageError: no network interface of this host has the address.
        DeadlineExceeded, PeerLost: another rank did not come.
    """
    interface_with(address)
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    before = listeners()
    options._devices = [backend.create_device(hostname=address)]
    new = listeners() - before  # several where another thread opens one just then
    options._timeout = timeout_of(deadline_s)
    with _meeting(size, deadline_s):
        group = backend(store, rank, size, options)
        return TorchCollective(
            group,
            device=torch.device("cpu"),
            address=address,
            deadline_s=deadline_s,
            names=names,
            timing=timing,
            listener=new.pop() if len(new) == 1 else None,
        )


def connect_nccl(
    store: Store, *, rank: int, size: int, device: torch.device, address: str, deadline_s: float | None = 300.0
) -> TorchCollective:
    """Meet the other ranks over NCCL, each with its CUDA device. Otherwise as `connect_gloo`."""
    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout_of(deadline_s)
    torch.cuda.set_device(device)
    with nccl_interface(address), _meeting(size, deadline_s):
        group = backend(store, rank, size, options)
        collective = TorchCollective(group, device=device, address=address, deadline_s=deadline_s)
        collective.barrier()
    return collective


@contextmanager
def _meeting(size: int, deadline_s: float | None) -> Iterator[None]:
    try:
        yield
    except PacelineError:
        raise
    except (RuntimeError, OSError) as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise DeadlineExceeded(f"not all of {size} ranks have met within {deadline_s} s: {error}") from None
        raise PeerLost(f"not all of {size} ranks have met: {error}") from None


@functools.lru_cache(maxsize=4096)
def _all_reduce_of(op: ReduceOp, dtype: torch.dtype, num_elements: int) -> str:
    return str(Signature("all_reduce", dtype, num_elements, op))
