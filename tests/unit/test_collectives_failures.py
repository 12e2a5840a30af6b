"""Every way in which a rank can fail the others: killed, late, aborted. The errors name it, within the deadline."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.errors import Aborted, UsageError
from tests.unit.collective_harness import World, caught, later, wait_for
from tests.unit.collective_programs import perform, random_calls

BACKENDS = ("shared_memory", "gloo")
DEADLINE_S = 40.0
SHORT_S = 3.0
"""A deadline that is to run out; a busy machine may hold up for most of it the rank that comes in time."""


def run_until_killed(collective: Collective, seed: int, victim: int, num_calls: int) -> tuple[str, str, float]:
    """Operations until one fails; the victim dies some time after it has begun its last.

    Returns name and message of the error, and how long after the last operation that succeeded it came.
    """
    last_s = time.time()

    def work() -> None:
        nonlocal last_s
        for number, call in enumerate(random_calls(seed, size=collective.size)):
            if number == num_calls and collective.rank == victim:
                later(random.Random(seed).uniform(0.0, 5e-3), os.kill, os.getpid(), signal.SIGKILL)
            perform(collective, call)
            last_s = time.time()

    name, message, at_s = caught(work)
    return name, message, at_s - last_s


def require_that_survivors_name_the_dead(backend: str, seed: int) -> None:
    generator = random.Random(seed)
    size = generator.choice((2, 3, 4))
    victim, num_calls = generator.randrange(size), generator.randrange(40)
    with World(backend, size, deadline_s=DEADLINE_S) as world:
        world.start(run_until_killed, seed, victim, num_calls)
        for rank in set(range(size)) - {victim}:
            name, message, after_s = world.result(rank)
            assert name == "PeerLost", (seed, rank, message)
            assert f"rank {victim} is lost" in message, (seed, rank)
            assert after_s < DEADLINE_S / 2, (seed, rank, message)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_of_a_killed_rank_name_it(backend: str, seed: int) -> None:
    require_that_survivors_name_the_dead(backend, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_of_many_killed_ranks_name_them(backend: str, seed: int) -> None:
    require_that_survivors_name_the_dead(backend, seed)


# What two ranks wait in while the last one does not come.
WAITS: dict[str, Callable[[Collective], Any]] = {
    "all_reduce(sum)": lambda collective: collective.all_reduce(torch.ones(3)).wait(),
    "broadcast": lambda collective: collective.broadcast(torch.ones(3), root=2),
    "gather": lambda collective: collective.gather(torch.ones(3), root=0),
    "scatter": lambda collective: collective.scatter(None, root=2),
    "all_gather": lambda collective: collective.all_gather(torch.ones(3)),
    "reduce_scatter": lambda collective: collective.reduce_scatter([torch.ones(3)] * 3),
    "all_to_all": lambda collective: collective.all_to_all([torch.ones(3)] * 3),
    "message": lambda collective: collective.recv(torch.ones(3), source=2).wait(),
    "barrier": lambda collective: collective.barrier(),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deadline_names_the_missing_rank(backend: str) -> None:
    with ExitStack() as stack:
        # All at once: nearly all of the time is spent asleep.
        worlds = {what: stack.enter_context(World(backend, 3)) for what in WAITS}
        for what, world in worlds.items():
            world.start(run_late, what)
        for what, world in worlds.items():
            results = [world.result(rank) for rank in (0, 1)]
            names = [first[0] for first, _ in results]
            # On a busy machine one may hear that the other has left, and why, before its own deadline is over.
            assert "DeadlineExceeded" in names, results
            for first, second in results:
                assert first[0] in ("DeadlineExceeded", "PeerLost"), first[1]
                assert "rank 2 has not taken part in" in first[1]
                assert what in first[1]
                assert f"within {SHORT_S} s" in first[1]
                if first[0] == "DeadlineExceeded":
                    assert second[0] == "DeadlineExceeded"
                    assert "unusable" in second[1]


def run_late(collective: Collective, what: str) -> list[tuple[str, str, float]]:
    collective.barrier()
    collective.set_deadline(SHORT_S)
    if collective.rank == 2:
        return []
    return [caught(lambda: WAITS[what](collective)), caught(collective.barrier)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deadline_counts_for_what_was_agreed_on_before(backend: str) -> None:
    with World(backend, 3) as world:
        for name, message, _ in world.run(run_late_again)[:2]:
            assert name == "DeadlineExceeded"
            assert "rank 2 has not taken part in all_reduce(sum)" in message


def run_late_again(collective: Collective) -> tuple[str, str, float]:
    collective.barrier()
    collective.set_deadline(SHORT_S)
    for _ in range(5):
        collective.all_reduce(torch.ones(3)).wait()
    if collective.rank == 2:
        return "", "", 0.0
    return caught(lambda: collective.all_reduce(torch.ones(3)).wait())


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_missing_ranks_are_named(backend: str) -> None:
    with World(backend, 3, deadline_s=0.5) as world:
        results = world.run(run_alone_at_barrier)
    assert results[0][0] == "DeadlineExceeded"
    assert "ranks 1, 2 have not" in results[0][1]


def run_alone_at_barrier(collective: Collective) -> tuple[str, str, float]:
    if collective.rank:
        return "", "", 0.0
    return caught(collective.barrier)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_leaves_says_why(backend: str) -> None:
    with World(backend, 2, deadline_s=DEADLINE_S) as pair:
        name, message, after_s = pair.run(run_leave)[0]
    assert name == "PeerLost"
    assert "rank 1 is lost: it left" in message
    assert after_s < DEADLINE_S / 2


def run_leave(collective: Collective) -> tuple[str, str, float]:
    collective.barrier()
    started_s = time.time()
    if collective.rank == 1:
        collective.close()
        return "", "", 0.0
    name, message, at_s = caught(lambda: [collective.barrier() for _ in itertools.count()])
    return name, message, at_s - started_s


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("waiting_for", ["all_reduce", "recv"])
def test_abort_from_another_thread(backend: str, waiting_for: str, tmp_path: Path) -> None:
    """Rank 1 comes only once rank 0 has stopped waiting for it."""
    with World(backend, 2) as pair:
        results = pair.run(run_aborted, waiting_for, tmp_path / "is-over")
    for name, message, _ in results[0]:
        assert name == "Aborted"
        assert "the run is over" in message
    name, message, _ = results[1][0]
    assert name == "PeerLost"
    assert "rank 0" in message
    assert "the run is over" in message


def run_aborted(collective: Collective, waiting_for: str, is_over: Path) -> list[Any]:
    collective.barrier()
    if collective.rank == 1:
        wait_for(is_over)
        # What rank 0 had put in place before it was aborted still counts.
        return [caught(lambda: [collective.all_reduce(torch.ones(3)).wait() for _ in range(2)])]
    later(0.2, collective.abort, "the run is over")
    tensor = torch.ones(3)
    wait = {
        "all_reduce": lambda: collective.all_reduce(tensor).wait(),
        "recv": lambda: collective.recv(tensor, source=1).wait(),
    }[waiting_for]
    errors = [caught(wait), caught(collective.barrier)]
    is_over.touch()
    return errors


def test_word_of_a_loss_ends_every_wait(tmp_path: Path) -> None:
    with World("gloo", 3) as world:
        results = world.run(run_without_the_last, tmp_path / "is-over")
    for name, message in itertools.chain(*results[:-1]):
        assert name == "PeerLost"
        assert "as I have heard" in message


def run_without_the_last(collective: Collective, is_over: Path) -> list[Any]:
    collective.barrier()
    if collective.rank == collective.size - 1:
        wait_for(is_over)
        return []
    later(0.2, collective.lose, "it is gone, as I have heard")
    errors = [caught(lambda: collective.all_reduce(torch.ones(3)).wait())[:2], caught(collective.barrier)[:2]]
    (is_over.parent / f"stopped-{collective.rank}").touch()
    if all((is_over.parent / f"stopped-{rank}").exists() for rank in range(collective.size - 1)):
        is_over.touch()
    return errors


def test_alone_ends_with_abort_and_close() -> None:
    alone = AloneCollective()
    alone.abort("enough")
    with pytest.raises(Aborted, match="enough"):
        alone.barrier()
    closed = AloneCollective()
    closed.close()
    closed.close()
    with pytest.raises(UsageError, match="closed"):
        closed.all_reduce(torch.ones(1))
