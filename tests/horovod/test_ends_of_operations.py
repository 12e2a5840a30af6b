"""How operations end that cannot be done, and what comes after shutdown."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.horovod.world import HorovodWorld


def test_a_dead_rank_ends_every_wait(tmp_path: Any) -> None:
    with HorovodWorld(2, tmp_path) as pair:
        pair.run(_init)
        pair.start(_reduce_for_ever)
        pair.kill(1)
        assert "HorovodInternalError" in pair.result(0, within_s=60.0)


def _init(rank: int) -> None:
    import paceline.horovod.torch as hvd

    hvd.init()


def _reduce_for_ever(rank: int) -> str:
    import paceline.horovod.torch as hvd

    try:
        for number in itertools.count():
            hvd.allreduce(torch.ones(4), name=f"tensor {number % 10}")
    except hvd.HorovodInternalError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_shutdown_and_init_again_and_again(world: HorovodWorld) -> None:
    for results in world.run(_come_and_go):
        assert results == [3.0] * 5


def _come_and_go(rank: int) -> list[float]:
    import paceline.horovod.torch as hvd

    results = []
    for _ in range(5):
        hvd.init()
        results.append(float(hvd.allreduce(torch.ones(()).view(1), op=hvd.Sum)))
        hvd.shutdown()
        assert not hvd.is_initialized()
    hvd.init()
    return results


def test_what_fails_in_the_middle_ends_for_all_who_wait(world: HorovodWorld, tmp_path: Any) -> None:
    for said in world.run(_refused_averages):
        assert "truth values have no average" in said
    with HorovodWorld(2, tmp_path) as pair:
        for said in pair.run(_fail_in_the_middle):
            assert said == ["HorovodInternalError", "HorovodInternalError"]


def _refused_averages(rank: int) -> str:
    import paceline.horovod.torch as hvd

    hvd.init()
    try:
        hvd.allreduce(torch.tensor([True]))
    except ValueError as error:
        return str(error)
    return ""


def _fail_in_the_middle(rank: int) -> list[str]:
    """The executor raises in a batch; what was asked for beside it must end as well."""
    import paceline.horovod.torch as hvd
    from paceline.horovod.runtime import GLOBAL, runtime

    hvd.init()

    def fail(batch: Any, operations: Any) -> None:
        raise OSError("no memory left")

    runtime().channel(GLOBAL)._executor.run = fail  # type: ignore[method-assign]
    handles = [hvd.allreduce_async(torch.ones(2), name=name) for name in "ab"]
    said = []
    for handle in handles:
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            said.append(type(error).__name__)
    return said


def test_who_has_not_asked_is_named_in_a_warning(tmp_path: Any) -> None:
    with HorovodWorld(2, tmp_path) as pair:
        warned, _ = pair.run(_stall)
        assert "'allreduce.late' for" in warned
        assert "another rank, which has asked for nothing," in warned


def _stall(rank: int) -> str:
    import os
    import time
    import warnings

    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.3"
    import paceline.horovod.torch as hvd

    hvd.init()
    hvd.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank:
            time.sleep(3.0)
        hvd.allreduce(torch.ones(2), name="late")
    return " ".join(str(each.message) for each in caught)


def test_who_ends_without_having_asked_is_named_with_what_waits_for_it(tmp_path: Any) -> None:
    with HorovodWorld(2, tmp_path) as pair:
        said, _ = pair.run(_end_early)
        assert said == "rank 1 has shut Horovod down, and 'allreduce.loss' waits here for all ranks"


def _end_early(rank: int) -> str:
    import paceline.horovod.torch as hvd

    hvd.init()
    hvd.barrier()
    if rank:
        hvd.shutdown()
        return ""
    try:
        hvd.allreduce(torch.ones(2), name="loss")
    except hvd.HorovodInternalError as error:
        return str(error)
    return "nothing"


def test_a_stall_ends_everything_where_that_is_asked_for(tmp_path: Any) -> None:
    with HorovodWorld(2, tmp_path) as pair:
        for said in pair.run(_stall_for_ever):
            assert "operations have waited for longer than 2.5 s: 'allreduce." in said
            assert "did not ask for it" in said


def _stall_for_ever(rank: int) -> str:
    """Ranks wait for different things, so that both know who is missing."""
    import os

    os.environ |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2.5"}
    import paceline.horovod.torch as hvd

    hvd.init()
    try:
        hvd.allreduce(torch.ones(2), name=f"only on {rank}")
    except hvd.HorovodInternalError as error:
        return str(error)
    return ""
