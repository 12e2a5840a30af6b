"""Operations in real processes, beside a loop over all ranks' inputs."""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline.horovod.torch as hvd
from paceline.horovod.runtime import GLOBAL, Runtime, runtime
from tests.horovod import programs
from tests.horovod.conftest import EVERYBODY
from tests.horovod.programs import Call, Form
from tests.horovod.world import HorovodWorld


def assert_right(found: list[list[torch.Tensor]], calls: list[Call], *, last: int | None = None) -> None:
    for rank, results in enumerate(found):
        mine = [(number, call) for number, call in enumerate(calls) if rank in call.members]
        if last is not None and rank == 0:
            mine = [(number, call) for number, call in mine if number < last]
        for (number, call), result in zip(mine, results, strict=True):
            gone = (0,) if last is not None and number >= last else ()
            torch.testing.assert_close(result, programs.wanted(call, rank, gone=gone), msg=f"{call} on rank {rank}")


@st.composite
def calls_of(draw: st.DrawFn, *, sets: list[tuple[int, ...]], kinds: tuple[str, ...]) -> list[Call]:
    count = draw(st.integers(1, 8))
    calls = []
    for number in range(count):
        members = draw(st.sampled_from(sets))
        kind = draw(st.sampled_from(kinds))
        op = draw(st.sampled_from(["Sum", "Average", "Min", "Max", "Product"] if "allreduce" in kind else ["Sum"]))
        calls.append(Call(kind, f"call {number}", members, draw(st.integers(1, 3)), op, draw(st.sampled_from(members))))
    return calls


KINDS = ("allreduce", "grouped_allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


REAL = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=4, **REAL)
@given(st.data())
def test_any_order_on_overlapping_process_sets(world: HorovodWorld, data: st.DataObject) -> None:
    run_in_any_order(world, data)


@pytest.mark.slow
@settings(max_examples=150, **REAL)
@given(st.data())
def test_any_order_on_overlapping_process_sets_thoroughly(world: HorovodWorld, data: st.DataObject) -> None:
    run_in_any_order(world, data)


def run_in_any_order(world: HorovodWorld, data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.sampled_from([(0, 1), (1, 2), (0, 2), (1,)]), unique=True, max_size=3))
    calls = data.draw(calls_of(sets=[EVERYBODY, *sets], kinds=KINDS))
    assert_right(world.run(programs.run, calls, sets, data.draw(st.integers(0, 99))), calls)


@settings(max_examples=6, **REAL)
@given(st.data())
def test_who_has_joined_gives_zeros(world: HorovodWorld, data: st.DataObject) -> None:
    run_with_join(world, data)


@pytest.mark.slow
@settings(max_examples=150, **REAL)
@given(st.data())
def test_who_has_joined_gives_zeros_thoroughly(world: HorovodWorld, data: st.DataObject) -> None:
    run_with_join(world, data)


def run_with_join(world: HorovodWorld, data: st.DataObject) -> None:
    calls = data.draw(calls_of(sets=[EVERYBODY], kinds=("allreduce", "grouped_allreduce")))
    last = data.draw(st.integers(0, len(calls)))
    seed = data.draw(st.integers(0, 99))
    assert_right(world.run(_run_with_join, calls, seed, last), calls, last=last)


def _run_with_join(rank: int, calls: list[Call], seed: int, last: int) -> Any:
    return programs.run(rank, calls, [], seed, last=last)


@st.composite
def forms_of(draw: st.DrawFn, *, sets: list[tuple[int, ...]]) -> list[list[Form]]:
    """Steps whose operations have the same few names, and are another tensor, on other ranks, in each."""
    form = st.builds(
        Form,
        st.sampled_from(["one", "two", "three"]),
        st.sampled_from(sets),
        st.sampled_from([(2, 3), (3, 2), (6,), (0, 2)]),
        st.sampled_from(["float32", "float64", "int64"]),
        st.sampled_from(["Sum", "Max"]),
        st.sampled_from([1.0, 2.0]),
        st.booleans(),
    )
    step = st.lists(form, min_size=1, max_size=6, unique_by=lambda each: (each.name, each.members, each.is_group))
    return draw(st.lists(step, min_size=1, max_size=6))


@settings(max_examples=4, **REAL)
@given(st.data())
def test_a_name_may_be_another_tensor_on_other_ranks_each_time(world: HorovodWorld, data: st.DataObject) -> None:
    run_forms(world, data)


@pytest.mark.slow
@settings(max_examples=150, **REAL)
@given(st.data())
def test_a_name_may_be_another_tensor_each_time_thoroughly(world: HorovodWorld, data: st.DataObject) -> None:
    run_forms(world, data)


def run_forms(world: HorovodWorld, data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.sampled_from([(0, 1), (1, 2), (0, 2), (1,)]), unique=True, max_size=3))
    steps = data.draw(forms_of(sets=[EVERYBODY, *sets]))
    for rank, found in enumerate(world.run(programs.run_forms, steps, sets, data.draw(st.integers(0, 99)))):
        mine = [[form for form in step if rank in form.members] for step in steps]
        for step, results in zip(mine, found, strict=True):
            for form, (result, is_own) in zip(step, results, strict=True):
                assert result.dtype == getattr(torch, form.dtype)
                assert is_own
                torch.testing.assert_close(result, form.wanted(), msg=f"{form} on rank {rank}")


def test_a_name_may_be_another_reduction_each_time(world: HorovodWorld) -> None:
    for found in world.run(_reduce_otherwise):
        assert found == [6.0, 2.0, 2.0, 6.0, 3.0, 2.0]


def _reduce_otherwise(rank: int) -> list[float]:
    import warnings

    import paceline.horovod.torch as hvd

    hvd.init()
    abouts: list[dict[str, Any]] = [{"average": False}, {}, {"average": True}, {"op": hvd.Sum}, {"op": hvd.Max}, {}]
    found = []
    for about in abouts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = hvd.allreduce_async_(torch.full((2,), rank + 1.0), name="otherwise", **about)
        assert [each.filename for each in caught] == [__file__] * ("average" in about)
        found.append(float(hvd.synchronize(handle)[0]))
    return found


def test_what_is_asked_for_as_a_round_begins_is_not_lost(alone: None) -> None:
    class Interrupted(list[Any]):
        """While its content is taken, another thread gets its turn, and asks."""

        def copy(self) -> list[Any]:
            taken = super().copy()
            if not late:
                late.append(hvd.allreduce_async(torch.ones(1), name="late"))
            return taken

    late: list[Any] = []
    runtime().channel(GLOBAL)._new = Interrupted()
    hvd.allreduce(torch.ones(1), name="early")
    until_s = time.monotonic() + 30
    while not hvd.poll(late[0]) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert late[0].is_over


def test_what_nobody_waits_for_is_taken_up_after_what_somebody_waited_for(alone: None) -> None:
    for number in range(5):
        hvd.allreduce(torch.ones(1), name=f"waited for {number}")
        time.sleep(0.05)  # the channel's thread, which was to take it up, finds that it is over
    handle = hvd.allreduce_async(torch.ones(1), name="not waited for")
    until_s = time.monotonic() + 10
    while not hvd.poll(handle) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert handle.is_over


def test_a_name_that_is_asked_for_anew_while_it_fails_ends_too(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        handles.append(hvd.allreduce_async(torch.ones(1), name="same"))
        raise OSError("the link is broken")

    handles: list[Any] = []
    monkeypatch.setattr(runtime().channel(GLOBAL)._executor, "run", fail)
    with pytest.raises(hvd.HorovodInternalError, match="the link is broken"):
        hvd.allreduce(torch.ones(1), name="same")
    assert handles[0].is_over
    with pytest.raises(hvd.HorovodInternalError, match="the link is broken"):
        hvd.synchronize(handles[0])


def test_who_joins_has_told_first_what_it_asked_for_before(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = runtime().channel(GLOBAL)
    news = channel._negotiator.news

    class Interrupted(list[Any]):
        """While its content is taken, another thread gets its turn, which asks, and joins."""

        def copy(self) -> list[Any]:
            taken = super().copy()
            if not late:
                late.append(hvd.allreduce_async(torch.ones(1), name="late"))
                channel._has_joined = True
            return taken

    def told(requests: list[Any], *, has_joined: bool = False, is_leaving: bool = False) -> Any:
        said.append(([each.name for each in requests], has_joined))
        return news(requests, has_joined=has_joined, is_leaving=is_leaving)

    late: list[Any] = []
    said: list[tuple[list[str], bool]] = []
    channel._new = Interrupted()
    monkeypatch.setattr(channel._negotiator, "news", told)
    hvd.allreduce(torch.ones(1), name="early")
    hvd.synchronize(late[0])
    assert said[:2] == [(["allreduce.early"], False), (["allreduce.late"], True)]


def test_no_zeros_stand_for_what_was_ended_meanwhile(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = runtime().channel(GLOBAL)
    hear = channel._negotiator.hear

    def hear_late(everyone: Any) -> Any:
        due = hear(everyone)
        channel._fail(hvd.HorovodInternalError("it took too long"))  # as another thread that waits may find
        return due

    done: list[Any] = []
    monkeypatch.setattr(channel._negotiator, "hear", hear_late)
    monkeypatch.setattr(channel._executor, "run", lambda *given: done.append(given))
    with pytest.raises(hvd.HorovodInternalError, match="it took too long"):
        hvd.allreduce(torch.ones(1), name="late")
    assert done == []


def test_threads_that_ask_without_names_get_a_name_each(alone: None) -> None:
    names: list[str] = []

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        """Before each of its instructions another thread may ask."""
        if frame.f_code is not Runtime.count.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            names.append(runtime().count(GLOBAL, "allreduce"))
        return interrupt

    traced_before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        names.append(runtime().count(GLOBAL, "allreduce"))
    finally:
        sys.settrace(traced_before)
    assert len(names) > 5
    assert sorted(map(int, names)) == [*range(1, len(names) + 1)]


def test_what_is_asked_for_after_joining_is_for_when_the_others_have_heard_of_it(world: HorovodWorld) -> None:
    """Zeros stand for it before, and it is told of once, though it was asked for before that was done."""
    late, *others = world.run(_ask_after_joining)
    assert late == [6.0, 6.0]
    assert others == [[5.0, 5.0, 6.0, 6.0]] * 2


def _ask_after_joining(rank: int) -> list[float]:
    import paceline.horovod.torch as hvd
    from paceline.horovod.runtime import GLOBAL, runtime

    hvd.init()

    def ask() -> Any:
        return hvd.allreduce_async(torch.full((2,), rank + 1.0), op=hvd.Sum, name="late")

    if rank > 0:
        found = [float(each) for _ in range(2) for each in hvd.synchronize(ask())]
        hvd.join()
        return found
    negotiator, asked = runtime().channel(GLOBAL)._negotiator, []
    hear = negotiator.hear

    def hear_and_ask(everyone: Any) -> Any:
        due = hear(everyone)
        if due and not asked:
            asked.append(ask())  # as another thread may, while this one is about to do what is due
        return due

    negotiator.hear = hear_and_ask
    try:
        hvd.join()
    finally:
        negotiator.hear = hear
    return [float(each) for each in hvd.synchronize(asked[0])]


def test_threads_ask_at_once_and_no_operation_is_lost(world: HorovodWorld) -> None:
    for sums, num_asked in world.run(_ask_in_threads):
        assert sums == [6.0] * 4 * 150
        assert num_asked == 50  # of the threads that ask for the same, one


def _ask_in_threads(rank: int) -> tuple[list[float], int]:
    import contextlib
    import random
    import sys
    import threading
    from concurrent.futures import ThreadPoolExecutor

    import paceline.horovod.torch as hvd
    from paceline.horovod.runtime import GLOBAL, runtime

    hvd.init()
    begin = threading.Barrier(4)

    def ask_for_own(thread: int) -> list[float]:
        order = random.Random(10 * rank + thread).sample(range(150), 150)
        begin.wait()
        handles = [
            hvd.allreduce_async(torch.full((3,), rank + 1.0), op=hvd.Sum, name=f"{thread} {number}") for number in order
        ]
        return [float(hvd.synchronize(handle)[0]) for handle in handles]

    def ask_for_the_same(thread: int) -> list[Any]:
        handles = []
        for number in range(50):
            begin.wait()
            with contextlib.suppress(ValueError):
                handles.append(hvd.allreduce_async(torch.ones(1), name=f"everybody's {number}"))
        return handles

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            sums = [each for sums in pool.map(ask_for_own, range(4)) for each in sums]
            with runtime().channel(GLOBAL)._driving:  # so that none is over before all have tried
                handles = [each for handles in pool.map(ask_for_the_same, range(4)) for each in handles]
    finally:
        sys.setswitchinterval(before_s)
    for handle in handles:
        hvd.synchronize(handle)
    return sums, len(handles)


def test_groups_in_place_and_asynchronous(world: HorovodWorld) -> None:
    """Those of the interface that are seldom used: all grouped ones, `alltoall_async` with splits, cross ranks."""
    for results in world.run(_use_groups):
        assert all(results.values()), results


def _use_groups(rank: int) -> dict[str, bool]:
    import paceline.horovod.torch as hvd

    hvd.init()
    size = hvd.size()
    total = sum(range(1, size + 1))
    tensors = [torch.full((size * length, 2), rank + 1.0) for length in (1, 2)]
    summed = hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="sum"))
    own = [tensor.clone() for tensor in tensors]
    in_place = hvd.synchronize(hvd.grouped_allreduce_async_(own, op=hvd.Max))
    also = [tensor.clone() for tensor in tensors]
    hvd.grouped_allreduce_(also, average=True)
    gathered = hvd.synchronize(hvd.grouped_allgather_async(tensors))
    scattered = hvd.synchronize(hvd.grouped_reducescatter_async(tensors, op=hvd.Average))
    splits = torch.arange(size)
    sent, received = hvd.synchronize(hvd.alltoall_async(torch.full((int(splits.sum()),), float(rank)), splits))
    places = [(hvd.cross_rank(), hvd.cross_size()), (hvd.local_rank(), hvd.local_size())]
    pair = hvd.add_process_set(hvd.ProcessSet([1, 0]))
    about = (pair.ranks, pair.size(), pair.included(), pair.rank() if rank < 2 else rank)
    mine = torch.full((2,), float(rank))
    if rank < 2:
        hvd.synchronize(hvd.allreduce_async_(mine, op=hvd.Sum, process_set=pair))
    hvd.remove_process_set(pair)
    first = torch.full((2,), rank + 5.0)
    handle = hvd.broadcast_async_(first, 1)
    hvd.synchronize(handle)
    halved = hvd.allreduce(torch.tensor([3, 4]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1 / size)
    return {
        "sum": all(bool((each == total).all()) for each in summed),
        "inputs are kept": all(bool((each == rank + 1).all()) for each in tensors),
        "in place": all(
            mine is other and bool((mine == size).all()) for mine, other in zip(own, in_place, strict=True)
        ),
        "average in place": all(bool((each == total / size).all()) for each in also),
        "gathered": [len(each) for each in gathered] == [size * size, 2 * size * size],
        "scattered": [len(each) for each in scattered] == [1, 2] and bool((scattered[0] == total / size).all()),
        "sent": sent.tolist() == [float(each) for each in range(size) for _ in range(rank)],
        "received": received.tolist() == [rank] * size,
        "places": places == [(0, 1), (rank, size)],
        "pair": about == ([0, 1], 2, rank < 2, rank) and mine.tolist() == [1.0 if rank < 2 else rank] * 2,
        "second's": first.tolist() == [6.0, 6.0],
        "whole numbers are cut": halved.tolist() == [1, 2],
        "what was waited for is gone": hvd.synchronize(handle) is None,
    }


def test_adasum_of_orthogonal_and_equal_gradients(world: HorovodWorld, tmp_path: Any) -> None:
    """Orthogonal ones are added, equal ones averaged; three ranks are refused."""
    with HorovodWorld(2, tmp_path) as pair:
        for orthogonal, equal in pair.run(_adasum):
            torch.testing.assert_close(orthogonal, torch.tensor([1.0, 1.0]))
            torch.testing.assert_close(equal, torch.tensor([3.0, 4.0]))
    for said in world.run(_refused_adasum):
        assert "power of two of ranks, not 3" in said


def _adasum(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    import paceline.horovod.torch as hvd

    hvd.init()
    own = torch.eye(2)[rank]
    return hvd.allreduce(own, op=hvd.Adasum), hvd.allreduce(torch.tensor([3.0, 4.0]), op=hvd.Adasum)


def _refused_adasum(rank: int) -> str:
    import paceline.horovod.torch as hvd

    hvd.init()
    try:
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_objects_travel_and_code_does_not_between_hosts(world: HorovodWorld) -> None:
    for found, gathered in world.run(_objects):
        assert found == {"rank": 1, "set": {1, 2}}
        assert gathered == [{"rank": rank} for rank in EVERYBODY]


def _objects(rank: int) -> tuple[Any, Any]:
    import paceline.horovod.torch as hvd

    hvd.init()
    return hvd.broadcast_object({"rank": rank, "set": {1, 2}}, root_rank=1), hvd.allgather_object({"rank": rank})


def test_timeline_names_operations(world: HorovodWorld, tmp_path: Any) -> None:
    import json

    file = tmp_path / "timeline.json"
    world.run(_draw_timeline, str(file))
    events = json.loads(file.read_text())
    names = [event["name"] for event in events]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= set(names)
    assert "allreduce.drawn" in [event.get("args", {}).get("name") for event in events]


def _draw_timeline(rank: int, file: str) -> None:
    import paceline.horovod.torch as hvd

    hvd.init()
    hvd.start_timeline(file, mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="drawn")
    hvd.barrier()
    hvd.stop_timeline()
