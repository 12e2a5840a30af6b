"""torch.distributed's process group, on Paceline's collectives."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from paceline.comm import base
from paceline.comm.base import Collective
from paceline.comm.connecting import connect
from paceline.errors import TensorMismatch, UsageError
from paceline.memory import keep_freed_memory
from paceline.torch_backend import BACKEND_NAME
from paceline.torch_backend.lane import INLINE_S, Lane
from paceline.torch_backend.reductions import all_reduce, blocks, reduce_scatter
from paceline.torch_backend.tagged_messages import Messages
from paceline.torch_backend.works import GroupWork

T = TypeVar("T")

# Any: the stubs tell of the overloads that callers see, not of the methods that a group written in Python has.
_ProcessGroup: Any = dist.ProcessGroup


def create(options: Any, _: Any) -> "PacelineProcessGroup":
    """What torch.distributed calls for a new group, on each of its ranks."""
    keep_freed_memory()
    deadline_s = options.timeout.total_seconds()
    rank, size = options.group_rank, options.group_size

    def connected(name: str, *, for_messages: bool) -> Collective:
        store = PrefixStore(name, options.store)
        return connect(store, rank=rank, size=size, deadline_s=deadline_s, for_messages=for_messages)

    collective = connected("collectives", for_messages=False)
    try:
        carrier = connected("messages", for_messages=True)
    except BaseException:
        collective.close()
        raise
    return PacelineProcessGroup(collective, carrier, name=options.group_id, deadline_s=deadline_s)


@final
class PacelineProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The methods that torch.distributed, DistributedDataParallel and FSDP call; users call torch.distributed.

    Collective operations run in the order of the calls; messages have a collective of their own, so that neither
    waits for the other. Methods take what torch's own process groups take: lists of tensors, and options of which
    `reduceOp`, `rootRank` and `asyncOp` count. The group's timeout holds for every operation.
    """

    def __init__(self, collective: Collective, message_carrier: Collective, *, name: str, deadline_s: float) -> None:
        """Takes over both collectives, which have the same ranks."""
        super().__init__(collective.rank, collective.size)
        self._collective = collective
        self._message_carrier = message_carrier
        has_core_a_rank = collective.size <= len(os.sched_getaffinity(0))
        self._lane = Lane(f"paceline {name} collectives", inline_s=INLINE_S if has_core_a_rank else 0.0)
        self._messages = Messages(
            message_carrier, f"paceline {name} messages", deadline_s=deadline_s, yields=has_core_a_rank
        )
        self._name = name
        self._description = "undefined"
        self._batch: list[GroupWork] | None = None

    # ---- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> GroupWork:
        return self._reduce("all_reduce", [_only(tensors)], tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> GroupWork:
        return self._reduce("all_reduce_coalesced", tensors, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        is_root = opts.rootRank == self._collective.rank
        # Only the root's tensor is to change.
        targets = tensors if is_root else [_only(tensors).detach().clone()]
        return self._reduce("reduce", targets, tensors, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> GroupWork:
        return self._reduce_scatter([_only(outputs)], [_only(inputs)], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> GroupWork:
        size = self._collective.size
        parts = [_split(whole, [output.numel()] * size) for output, whole in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter(outputs, parts, opts)

    # ---- one to all, all to one, all to all ----------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        run = partial(self._collective.broadcast, _only(tensors), root=opts.rootRank)
        return self._run("broadcast", run, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        return self.allgather_coalesced([[target] for target in _only(outputs)], [_only(inputs)], opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        """`outputs[rank][i]` gets that rank's i-th input."""

        def run() -> None:
            for position, tensor in enumerate(inputs):
                _fill_each([theirs[position] for theirs in outputs], self._collective.all_gather(tensor))

        return self._run("all_gather", run, [target for targets in outputs for target in targets], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                _fill_parts(output, self._collective.all_gather(tensor))

        return self._run("all_gather", run, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> GroupWork:
        tensor = _only(inputs)
        targets = outputs[0] if outputs else []

        def run() -> None:
            gathered = self._collective.gather(tensor, root=opts.rootRank)
            if gathered is not None:
                _fill_each(targets, gathered)

        return self._run("gather", run, targets, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> GroupWork:
        output = _only(outputs)

        def run() -> None:
            _fill(output, self._collective.scatter(inputs[0] if inputs else None, root=opts.rootRank))

        return self._run("scatter", run, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        def run() -> None:
            _fill_each(outputs, self._collective.all_to_all(inputs))

        return self._run("all_to_all", run, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> GroupWork:
        """Splits count rows of the first dimension; without them the rows are split evenly."""
        size = self._collective.size
        parts = _split(input, _in_elements(input, input_splits, size=size))
        lengths = _in_elements(output, output_splits, size=size)

        def run() -> None:
            received = self._collective.all_to_all(parts)
            for rank, (part, length) in enumerate(zip(received, lengths, strict=True)):
                _require_length(part, length, rank)
            _fill_parts(output, received)

        return self._run("all_to_all", run, [output], opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._run("barrier", self._collective.barrier, [], opts)

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> GroupWork:
        return self._add(self._messages.send(_only(tensors), destination=destination, tag=tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> GroupWork:
        return self._add(self._messages.recv(_only(tensors), source=source, tag=tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> GroupWork:
        return self._add(self._messages.recv(_only(tensors), source=None, tag=tag))

    # ---- the group itself ----------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND_NAME

    def name(self) -> str:
        return BACKEND_NAME

    # torch keeps a group's name and description with its backends, of which a group written in Python has none.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._messages.deadline_s = timeout.total_seconds()
        self._collective.set_deadline(timeout.total_seconds())
        self._message_carrier.set_deadline(timeout.total_seconds())

    def abort(self) -> None:
        """End all that is under way with `Aborted`, here and, for ranks that wait for this one, elsewhere."""
        for collective in (self._collective, self._message_carrier):
            collective.abort("its process group was aborted")

    def shutdown(self) -> None:
        """Give back threads, descriptors and memory; a second call does nothing."""
        for collective in (self._collective, self._message_carrier):
            collective.abort("its process group was destroyed")
        self._lane.close()
        self._messages.close()
        self._collective.close()
        self._message_carrier.close()

    def _start_coalescing(self, device: torch.device) -> None:
        """From here on, collect what `_end_coalescing` is to wait for; the operations start at once all the same."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        batch, self._batch = self._batch or [], None

        def wait(_: GroupWork, timeout_s: float | None) -> None:
            for one in batch:
                one.wait(timedelta(seconds=timeout_s or 0))
            whole.wait_until_over(timeout_s)  # another thread may have ended the last one, and is about to call `end`

        def end(_: object) -> None:
            error = next((one.exception() for one in batch if one.exception() is not None), None)
            whole.end(error)

        whole = GroupWork("coalesced operations", base.Finished, [], wait)
        torch.futures.collect_all([one.get_future() for one in batch]).add_done_callback(end)
        return whole

    # What C++ still calls, and earlier versions of torch, by their old names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _reduce(self, label: str, targets: list[Tensor], outputs: list[Tensor], opts: Any) -> GroupWork:
        op = _reduce_op(opts)

        def start() -> base.Work:
            return _AllOf([all_reduce(self._collective, target, op) for target in targets])

        return self._submit(label, start, outputs, opts, never_blocks=not blocks(targets, op))

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> GroupWork:
        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                _fill(output, reduce_scatter(self._collective, parts, _reduce_op(opts)))

        return self._run("reduce_scatter", run, outputs, opts)

    def _run(self, label: str, run: Callable[[], None], outputs: list[Tensor], opts: Any) -> GroupWork:
        """Submit an operation that blocks."""

        def start() -> base.Work:
            run()
            return base.Finished()

        return self._submit(label, start, outputs, opts, never_blocks=False)

    def _submit(
        self, label: str, start: Callable[[], base.Work], outputs: list[Tensor], opts: Any, *, never_blocks: bool
    ) -> GroupWork:
        work = GroupWork(label, start, outputs, self._lane.help)
        self._lane.submit(work, is_async=opts is None or opts.asyncOp, never_blocks=never_blocks)
        return self._add(work)

    def _add(self, work: GroupWork) -> GroupWork:
        if self._batch is not None:
            self._batch.append(work)
        return work


@final
class _AllOf(base.Work):
    def __init__(self, works: Sequence[base.Work]) -> None:
        self._works = works

    def poll(self) -> bool:
        return all(work.poll() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _reduce_op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _only(items: Sequence[T]) -> T:
    if len(items) != 1:
        raise UsageError(f"one tensor a process is needed, not {len(items)}")
    return items[0]


def _in_elements(tensor: Tensor, splits: Sequence[int], *, size: int) -> list[int]:
    """Rows for each rank as numbers of elements."""
    num_rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    if not splits:
        if num_rows % size:
            raise UsageError(f"{num_rows} rows cannot be split evenly among {size} ranks; pass split sizes")
        splits = [num_rows // size] * size
    if len(splits) != size or sum(splits) != num_rows:
        raise UsageError(f"{size} split sizes that add up to {num_rows} rows are needed, not {list(splits)}")
    row = tensor.numel() // num_rows if num_rows else 0
    return [num * row for num in splits]


def _split(tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    if sum(lengths) != tensor.numel():
        raise UsageError(f"a tensor of {tensor.numel()} elements cannot be split into parts of {list(lengths)}")
    return list(torch.split_with_sizes(tensor.detach().contiguous().view(-1), list(lengths)))


def _require_length(part: Tensor, length: int, rank: int) -> None:
    if part.numel() != length:
        raise TensorMismatch(f"rank {rank} sent {part.numel()} elements for a tensor of {length}")


def _fill(target: Tensor, result: Tensor) -> None:
    target.detach().copy_(result.view(target.shape))


def _fill_each(targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    if len(targets) != len(results):
        raise UsageError(f"{len(results)} tensors are needed to take the results, not {len(targets)}")
    for rank, (target, result) in enumerate(zip(targets, results, strict=True)):
        _require_length(result, target.numel(), rank)
        _fill(target, result)


def _fill_parts(target: Tensor, results: Sequence[Tensor]) -> None:
    _fill(target, torch.cat([result.view(-1) for result in results]))
