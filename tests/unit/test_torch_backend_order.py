"""Order and progress of the torch.distributed backend, and what it can do that gloo cannot."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from paceline.errors import DeadlineExceeded, TensorMismatch, UsageError
from tests.ranks import RankFailed
from tests.unit.collective_harness import wait_for
from tests.unit.torch_backend_world import TorchWorld

LARGE = 2**20  # float32 elements: several pieces of every channel
PATIENCE_S = 20.0  # the groups' timeout is 60 s


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchWorld]:
    with TorchWorld(3, tmp_path_factory.mktemp("trio")) as world:
        yield world


def raised(function: Callable[[], Any], kind: type[Exception]) -> str:
    """The message of the `kind` of error that `function` raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


# ---- order -----------------------------------------------------------------------------------------------------------


def use_two_groups(rank: int, blocking: bool) -> list[float]:
    groups = [dist.new_group(backend="paceline") for _ in range(2)]
    values = [torch.full((LARGE,), float(number)) for number in (1, 10)]
    order = (0, 1) if rank == 0 else (1, 0)

    def begin(number: int) -> Any:
        if blocking:
            return dist.broadcast(values[number], 0, group=groups[number], async_op=True)
        return dist.all_reduce(values[number], group=groups[number], async_op=True)

    works = [begin(number) for number in order]
    for work in works:
        work.wait()
    for group in groups:
        dist.destroy_process_group(group)
    return [float(value[0]) for value in values]


@pytest.mark.parametrize("blocking", [False, True], ids=["all_reduce", "broadcast"])
def test_groups_may_be_used_in_different_orders(trio: TorchWorld, blocking: bool) -> None:
    expected = [1.0, 10.0] if blocking else [3.0, 30.0]
    assert trio.run(use_two_groups, blocking) == [expected] * 3


def mix_messages_with_collectives(rank: int) -> float:
    """Rank 0 gathers before it sends; rank 1 receives before it gathers."""
    message = torch.full((LARGE,), 7.0) if rank == 0 else torch.zeros(LARGE)
    gathered = [torch.zeros(1) for _ in range(3)]
    if rank == 1:
        dist.recv(message, 0)
    work = dist.all_gather(gathered, torch.ones(1), async_op=True)
    if rank == 0:
        dist.isend(message, 1).wait()
    work.wait()
    return float(message[0])


def test_messages_do_not_wait_for_collectives(trio: TorchWorld) -> None:
    assert trio.run(mix_messages_with_collectives)[1] == 7.0


def queue_many(rank: int) -> list[float]:
    tensors = [torch.full((length,), float(rank + 1)) for length in (10, LARGE, 3, 100_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    time.sleep(0.05 * rank)
    dist.barrier()  # behind them all
    assert all(work.is_completed() for work in works)
    return [float(tensor[-1]) for tensor in tensors]


def test_asynchronous_operations_run_in_the_order_of_the_calls(trio: TorchWorld) -> None:
    assert trio.run(queue_many) == [[6.0] * 4] * 3


def reduce_in_a_callback(rank: int, delayed_rank: int) -> list[float]:
    """As PowerSGD does; the operation asked for meanwhile must come after the callback's on every rank."""
    first, second, third = torch.ones(LARGE), torch.ones(5), torch.ones(7)
    if rank == delayed_rank:
        time.sleep(0.1)

    def again(future: Any) -> Tensor:
        second.mul_(future.value()[0][0])
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    chain = dist.all_reduce(first, async_op=True).get_future().then(again)
    work = dist.all_reduce(third, async_op=True)
    total = chain.wait()
    work.wait()
    return [float(total[0]), float(third[0])]


@pytest.mark.parametrize("delayed_rank", [0, 2])
def test_a_callback_may_ask_for_operations(trio: TorchWorld, delayed_rank: int) -> None:
    assert trio.run(reduce_in_a_callback, delayed_rank) == [[9.0, 3.0]] * 3


def send_and_look_away(rank: int, has_arrived: Path) -> None:
    """Rank 0 does nothing for its message before it has arrived."""
    tensor = torch.full((4 * LARGE,), 1.0 + rank)
    if rank == 0:
        work = dist.isend(tensor, 1)
        wait_for(has_arrived)
        work.wait()
    elif rank == 1:
        dist.recv(tensor, 0)
        assert tensor[-1] == 1.0
        has_arrived.touch()


def test_messages_move_while_nobody_waits_for_them(trio: TorchWorld, tmp_path: Path) -> None:
    trio.run(send_and_look_away, tmp_path / "has-arrived")


def wait_with_timeout(rank: int, folder: Path) -> str:
    """Rank 0 comes only once the others have waited in vain."""
    message = ""
    if rank == 0:
        for other in (1, 2):
            wait_for(folder / str(other))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank:
        message = raised(lambda: work.wait(timedelta(seconds=0.05)), DeadlineExceeded)
        (folder / str(rank)).touch()
    work.wait()
    return message


def test_a_wait_keeps_its_timeout_and_can_be_taken_up_again(trio: TorchWorld, tmp_path: Path) -> None:
    for message in trio.run(wait_with_timeout, tmp_path)[1:]:
        assert "all_reduce is not over after 0.05 s" in message


# ---- what gloo does not do -------------------------------------------------------------------------------------------


def receive_from_anybody(rank: int) -> list[int]:
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=3)
        return []
    tensor = torch.zeros(1, dtype=torch.int64)
    found = []
    for _ in range(2):
        source = dist.recv(tensor, tag=3)
        found.append(source)
        assert tensor.item() == source
    return sorted(found)


def test_receives_from_any_rank(trio: TorchWorld) -> None:
    assert trio.run(receive_from_anybody)[0] == [1, 2]


def gather_uneven(rank: int) -> list[list[float]]:
    outputs = [torch.empty(length, 2) for length in (1, 2, 3)]
    dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
    return [output.flatten().tolist() for output in outputs]


def test_gathers_tensors_of_different_lengths(trio: TorchWorld) -> None:
    assert trio.run(gather_uneven) == [[[0.0] * 2, [1.0] * 4, [2.0] * 6]] * 3


def average(rank: int) -> list[list[float]]:
    tensors = [torch.tensor([rank, 5 * rank, -rank], dtype=dtype) for dtype in (torch.float32, torch.int64)]
    for tensor in tensors:
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    output = torch.empty(1)
    dist.reduce_scatter_tensor(output, torch.arange(3.0) * rank, dist.ReduceOp.AVG)
    return [*(tensor.tolist() for tensor in tensors), output.tolist()]


def test_averages(trio: TorchWorld) -> None:
    for rank, results in enumerate(trio.run(average)):
        assert results == [[1.0, 5.0, -1.0], [1, 5, -1], [float(rank)]]


def stack(rank: int) -> list[list[float]]:
    output = torch.empty(3, 2)
    dist.all_gather_into_tensor(output, torch.full((2,), float(rank)))
    return output.tolist()


def test_gathers_into_stacked_tensors(trio: TorchWorld) -> None:
    assert trio.run(stack) == [[[0.0] * 2, [1.0] * 2, [2.0] * 2]] * 3


def coalesce(rank: int, by_device: bool, is_async: bool) -> list[float]:
    tensors = [torch.full((length,), float(rank)) for length in (2, 50_000)]
    with (
        warnings.catch_warnings(),
        _coalescing_manager(device=torch.device("cpu") if by_device else None, async_ops=is_async) as manager,
    ):
        for tensor in tensors:
            dist.all_reduce(tensor)
    if is_async:
        manager.wait()
    return [float(tensor[0]) for tensor in tensors]


@pytest.mark.parametrize("by_device", [False, True], ids=["fast", "by device"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_coalesces(trio: TorchWorld, by_device: bool, is_async: bool) -> None:
    assert trio.run(coalesce, by_device, is_async) == [[3.0, 3.0]] * 3


def coalesce_parts(rank: int) -> list[list[float]]:
    """The coalesced forms that FSDP and functional collectives use."""
    group = dist.group.WORLD
    gathered = [torch.empty(3), torch.empty(6)]
    group.all_gather_single_coalesced(gathered, [torch.full((1,), float(rank)), torch.full((2,), float(rank))]).wait()
    scattered = [torch.empty(1), torch.empty(2)]
    options = dist.ReduceScatterOptions()
    group.reduce_scatter_single_coalesced(scattered, [torch.arange(3.0), torch.arange(6.0)], options).wait()
    lists = [[torch.empty(1), torch.empty(2)] for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(lists, [torch.full((1,), float(rank)), torch.full((2,), -float(rank))])
    return [tensor.tolist() for tensor in (*gathered, *scattered, *lists[2])]


def test_gathers_and_scatters_several_tensors(trio: TorchWorld) -> None:
    for rank, results in enumerate(trio.run(coalesce_parts)):
        assert results == [
            [0.0, 1.0, 2.0],
            [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            [3.0 * rank],
            [6.0 * rank, 6.0 * rank + 3],
            [2.0],
            [-2.0, -2.0],
        ]


def use_functional_collectives(rank: int) -> list[list[float]]:
    import torch.distributed._functional_collectives as functional  # seconds, and only this test needs it

    group, mine = dist.group.WORLD, torch.full((3,), float(rank))
    results = [
        functional.all_reduce(mine, "sum", group),
        functional.all_gather_tensor(mine[:1], 0, group),
        functional.reduce_scatter_tensor(mine, "sum", 0, group),
        functional.broadcast(mine, 1, group),
        functional.all_to_all_single(mine, None, None, group),
    ]
    return [torch.as_tensor(result).tolist() for result in results]


@pytest.mark.slow
def test_functional_collectives(trio: TorchWorld) -> None:
    expected = [[3.0] * 3, [0.0, 1.0, 2.0], [3.0], [1.0] * 3, [0.0, 1.0, 2.0]]
    assert trio.run(use_functional_collectives) == [expected] * 3


# ---- groups ----------------------------------------------------------------------------------------------------------


def use_subsets(rank: int) -> list[float]:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1], [2, 1, 0])]
    values = []
    for group, ranks in zip(groups, ([0, 2], [1], [0, 1, 2]), strict=True):
        if rank in ranks:
            tensor = torch.tensor([1.0 + rank])
            dist.all_reduce(tensor, group=group)
            values.append(tensor.item())
    if rank in (0, 2):
        tensor = torch.tensor([1.0 + rank])
        dist.broadcast(tensor, 2, group=groups[0])  # a rank of the world, not of the group
        values.append(tensor.item())
    return values


def test_groups_of_some_ranks(trio: TorchWorld) -> None:
    assert trio.run(use_subsets) == [[4.0, 6.0, 3.0], [2.0, 6.0], [4.0, 6.0, 3.0]]


def leave_nothing(rank: int) -> tuple[list[str], int, int]:
    def mine() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("paceline" in line for line in maps)

    before = mine()
    group = dist.new_group(backend="paceline")
    dist.all_gather([torch.empty(LARGE) for _ in range(3)], torch.ones(LARGE), group=group, async_op=True).wait()
    incoming = torch.empty(LARGE)
    works = [dist.isend(torch.ones(LARGE), (rank + 1) % 3, group=group), dist.irecv(incoming, (rank - 1) % 3, group)]
    for work in works:
        work.wait()
    dist.barrier(group)
    name = group.group_name
    during = mine()
    assert during[1] > before[1]
    dist.destroy_process_group(group)
    del group, works, work
    after = mine()
    threads = [thread.name for thread in threading.enumerate() if f"paceline {name} " in thread.name]
    return threads, after[0] - before[0], after[1] - before[1]


def test_a_destroyed_group_leaves_nothing(trio: TorchWorld) -> None:
    trio.run(leave_nothing)  # what is made once a process is made now
    assert trio.run(leave_nothing) == [([], 0, 0)] * 3


def use_a_world_of_one(_: int) -> list[float]:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor, output = torch.tensor([3.0]), [torch.zeros(1)]
    dist.all_reduce(tensor, group=group)
    dist.all_gather(output, tensor, group=group)
    dist.scatter(tensor, output, group_src=0, group=group)
    dist.barrier(group)
    return [tensor.item(), output[0].item()]


def test_a_world_of_one(trio: TorchWorld) -> None:
    assert trio.run(use_a_world_of_one) == [[3.0, 3.0]] * 3


# ---- errors ----------------------------------------------------------------------------------------------------------


def ask_for_nonsense(rank: int) -> list[str]:
    return [
        raised(lambda: dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0)), UsageError),
        raised(lambda: dist.all_reduce(torch.ones(3, 3).to_sparse_csr()), TypeError),
        raised(lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX), UsageError),
        raised(lambda: dist.all_reduce(torch.ones(3 + rank).to_sparse()), TensorMismatch),
        raised(lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1, 1], [2, 1, 1]), UsageError),
    ]


def test_refuses_what_it_cannot_do(trio: TorchWorld) -> None:
    for premultiplied, compressed, sparse_max, mismatch, splits in trio.run(ask_for_nonsense):
        assert "PREMUL_SUM" in premultiplied
        assert "SUM, AVG" in premultiplied
        assert "dense" in compressed
        assert "sparse tensors have SUM and AVG" in sparse_max
        assert "rank 0 has [[3], 1, 'torch.float32'], rank 1 has [[4]" in mismatch
        assert "add up to 4 rows" in splits


def receive_too_much(rank: int) -> list[str]:
    messages = []
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        tensor = torch.zeros(2)
        messages.append(raised(lambda: dist.recv(tensor, 0), TensorMismatch))
        dist.recv(tensor, 0)
        messages.append(repr(tensor.tolist()))
    return messages


def test_a_message_of_the_wrong_length_spoils_only_itself(trio: TorchWorld) -> None:
    message, after = trio.run(receive_too_much)[1]
    assert "rank 0 sent 12 bytes" in message
    assert after == "[1.0, 1.0]"


def disagree(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank % 2))


def test_ranks_that_disagree_are_told_apart(trio: TorchWorld) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 asks for all_reduce.* of 3 elements.*rank 1 for .* of 4 elements"):
        trio.run(disagree)


def wait_in(rank: int, operation: str) -> tuple[str, float]:
    try:
        if rank == 2:
            time.sleep(60)
        elif operation == "all_reduce":
            dist.all_reduce(torch.ones(LARGE))
        elif operation == "future":
            dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        elif operation == "recv":
            dist.recv(torch.ones(3), 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.time()
    return "", time.time()


def meet(_: int) -> None:
    dist.barrier()


@pytest.mark.parametrize("operation", ["all_reduce", "future", "recv"])
def test_a_killed_rank_is_named(trio: TorchWorld, operation: str) -> None:
    trio.run(meet)  # else the rank may be killed before the others know it
    trio.start(wait_in, operation)
    time.sleep(0.5)
    killed_s = trio.kill(2)
    try:
        for rank in (0, 1):
            message, ended_s = trio.result(rank)
            # The future's error has come through C++, which knows only RuntimeError.
            assert message.startswith("RuntimeError" if operation == "future" else "PeerLost"), message
            assert "PeerLost" in message
            assert "rank 2" in message or "unusable since" in message
            assert ended_s - killed_s < PATIENCE_S
    finally:
        trio.close()


def be_late(rank: int, operation: str) -> str:
    group = dist.new_group(backend="paceline", timeout=timedelta(seconds=6.0))
    if rank == 2:
        return ""
    function = (lambda: dist.barrier(group)) if operation == "barrier" else (lambda: dist.recv(torch.ones(1), 2, group))
    return raised(function, DeadlineExceeded)


@pytest.mark.parametrize("operation", ["barrier", "recv"])
def test_a_late_rank_is_named_when_the_groups_timeout_is_over(trio: TorchWorld, operation: str) -> None:
    for message in trio.run(be_late, operation)[:2]:
        assert "rank 2" in message
        assert "6.0 s" in message
