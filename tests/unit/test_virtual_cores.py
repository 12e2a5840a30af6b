"""Cores that simulated hosts share, against what queueing theory and hand calculation say."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.virtual.computing.cores import SLICE_S, TICK_S, Core, Thread
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.lead import Lead
from paceline.engines.virtual.network.links import Handling, Link, Network
from paceline.engines.virtual.process import Process, Scheduler, Signal

Job = tuple[float, int, float]
"""When it comes, its thread, and its work."""


def ends_s(jobs: list[Job], **settings: float) -> list[float]:
    """When each job on one core is done, in the order of `jobs`."""
    timeline, ends = EventQueue(), dict[int, float]()
    core = Core(timeline, **settings)
    threads = {number: Thread(core) for _, number, _ in jobs}
    for index, (comes_s, thread, work_s) in enumerate(jobs):
        note = partial(lambda at: ends.setdefault(at, timeline.now_s), index)
        timeline.at(comes_s, threads[thread].run, work_s, note)
    timeline.run()
    return [ends[index] for index in range(len(jobs))]


def test_a_thread_alone_has_the_core_to_itself() -> None:
    assert ends_s([(1.0, 0, 0.0305)]) == pytest.approx([1.0305])


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_alike_jobs_end_in_the_last_round(num_threads: int) -> None:
    """Of m ticks each, the i-th of k jobs ends after (m - 1) k + i ticks."""
    found = ends_s([(0.0, thread, 3 * TICK_S) for thread in range(num_threads)])
    assert found == pytest.approx([(2 * num_threads + place + 1) * TICK_S for place in range(num_threads)])


def test_jobs_on_several_cores_do_not_meet() -> None:
    """Six jobs of 10 ms on two cores are done after 30 ms, as three are on one."""
    timeline, ends = EventQueue(), list[float]()
    cores = [Core(timeline), Core(timeline)]
    for number in range(6):
        Thread(cores[number % 2]).run(0.01, lambda: ends.append(timeline.now_s))
    timeline.run()
    assert max(ends) == pytest.approx(0.03)
    assert sorted(ends)[:2] == sorted(ends)[:1] * 2


@pytest.mark.parametrize(("before_s", "waits_s"), [(SLICE_S, 0.0), (0.5 * SLICE_S, 0.6e-3)])
def test_who_comes_gets_the_core_unless_another_has_just_begun(before_s: float, waits_s: float) -> None:
    """Else it waits for the clock's next tick, here 0.6 ms later."""
    comes_s = 3 * TICK_S - 0.6e-3
    found = ends_s([(comes_s - before_s, 0, 0.1), (comes_s, 1, 1e-3)])
    if before_s < SLICE_S:  # at the tick, too, it has not had its slice
        assert before_s + 0.6e-3 < SLICE_S
        waits_s += TICK_S
    assert found == pytest.approx([comes_s - before_s + 0.1 + 1e-3, comes_s + waits_s + 1e-3])


def test_a_thread_that_comes_often_leaves_others_their_slices() -> None:
    """Jobs of 1 ms that come every 1.2 ms, beside one of 20 ms: this one has its slice after each of them."""
    often = [(1.2e-3 * number, 1, 1e-3) for number in range(40)]
    long_s = ends_s([(0.0, 0, 0.02), *often])[0]
    assert long_s <= 0.02 / SLICE_S * (SLICE_S + TICK_S)
    assert long_s > 0.02


def test_thin_slices_share_a_core_evenly() -> None:
    """Processor sharing: two jobs of 10 and 20 ms that begin together end after 20 and 30 ms."""
    found = ends_s([(0.0, 0, 0.01), (0.0, 1, 0.02)], slice_s=0.0, tick_s=1e-5)
    assert found == pytest.approx([0.02, 0.03], abs=2e-5)


JOBS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=12)


@given(JOBS)
def test_no_core_is_idle_while_there_is_work(milliseconds: list[tuple[int, int, int]]) -> None:
    """So the last end is that of one queue, in whatever order it is served (Lindley's recursion)."""
    jobs = [(comes * 1e-3, thread, work * 1e-3) for comes, thread, work in milliseconds]
    found = ends_s(jobs)
    done_s = 0.0
    for comes_s, _, work_s in sorted(jobs):
        done_s = max(done_s, comes_s) + work_s
    assert max(found) == pytest.approx(done_s)
    assert found == ends_s(jobs)
    for (comes_s, thread, work_s), end_s in zip(jobs, found, strict=True):
        own_s = [
            end for (came_s, other, _), end in zip(jobs, found, strict=True) if other == thread and came_s < comes_s
        ]
        assert end_s >= comes_s + work_s - 1e-12
        assert all(end_s >= other_s for other_s in own_s)


# --- processes -------------------------------------------------------------------------------------------------------


def run(*programs: Callable[[Process], None], num_cores: int = 1) -> None:
    """Each program in a process, on cores that these take turns at."""
    timeline = EventQueue()
    scheduler = Scheduler(timeline, require_waitable=lambda: None)
    cores = [Core(timeline) for _ in range(num_cores)]
    for number, program in enumerate(programs):
        process = scheduler.spawn(f"process-{number}", lambda n=number, p=program: p(scheduler.processes[n]))  # type: ignore[misc]
        process.lead = Lead(timeline, Thread(cores[number % num_cores]))
    scheduler.run()


def test_what_a_process_does_waits_for_its_core() -> None:
    """Two compute 6 ms, post, and compute 6 ms more, in turns of 4 ms; then one rests, in which the core is free."""
    seen: list[tuple[str, float]] = []

    def program(name: str, process: Process) -> None:
        def note(what: str) -> None:
            seen.append((f"{name} {what}", round(process.timeline.now_s, 9)))

        process.compute(0.006)
        process.post(note, "half")
        process.compute(0.006)
        process.advance(0.002)
        process.post(note, "rested")
        assert process.now_s == pytest.approx(0.014)  # as if it were alone
        assert process.catch_up() == process.timeline.now_s > 0.014

    run(partial(program, "a"), partial(program, "b"))
    assert seen == [("a half", 0.010), ("b half", 0.014), ("a rested", 0.022), ("b rested", 0.026)]


def test_a_process_whose_signal_fires_goes_on_when_its_core_is_done() -> None:
    resumed_s: list[float] = []

    def program(process: Process) -> None:
        signal = Signal()
        process.timeline.at(1e-3, signal.fire, process.timeline)
        process.compute(0.004)
        process.wait(signal, lambda: "the signal")
        resumed_s.append(process.now_s)

    run(program, program)
    assert resumed_s == pytest.approx([0.004, 0.008])


# --- messages --------------------------------------------------------------------------------------------------------


def test_messages_keep_a_core_busy() -> None:
    timeline, arrived_s = EventQueue(), list[float]()
    handling = Handling(Thread(Core(timeline)), math.inf, 1e-3)
    network = Network(timeline, lambda source, destination: (Link("card", 125e6), handling))
    for _ in range(3):
        timeline.at(1.0, network.send, 0, 1, 0.0, lambda: arrived_s.append(timeline.now_s))
    timeline.run()
    assert arrived_s == pytest.approx([1.001, 1.002, 1.003])


@pytest.mark.parametrize("computes", [False, True])
def test_messages_bytes_take_a_core_that_may_compute(computes: bool) -> None:
    """2 MB pass the card in 16 ms, and need the core for 2 ms; it has them within the computing's 30 ms and a slice."""
    timeline, arrived_s = EventQueue(), list[float]()
    core = Core(timeline)
    handling = Handling(Thread(core), 1e9)
    network = Network(timeline, lambda source, destination: (Link("card", 125e6), handling), chunk_bytes=math.inf)
    network.send(0, 1, 2e6, lambda: arrived_s.append(timeline.now_s))
    done_s: list[float] = []
    if computes:
        Thread(core).run(0.03, lambda: done_s.append(timeline.now_s))
    timeline.run()
    assert arrived_s == pytest.approx([0.016])
    assert done_s == pytest.approx([0.032] if computes else [])
