"""Who is to blame for a failed run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.engines.blame import Statement, judge
from paceline.engines.scripting import outcome_of
from paceline.errors import Aborted, DeadlineExceeded, NonFiniteGradient, PacelineError, PeerLost, RunFailed, UsageError
from paceline.strategies import build


def worker(rank: int, num_steps: int, error: BaseException | None = None, *, is_dead: bool = False) -> Statement:
    outcome = None if error is None else outcome_of(error, num_steps=num_steps)
    return Statement(f"worker-{rank}", 100 + rank, num_steps, outcome, is_dead=is_dead)


def verdict(*members: Statement, is_training: bool = True, is_synchronous: bool = True) -> PacelineError:
    return judge(members, is_training=is_training, is_synchronous=is_synchronous)


def test_survivors_know_the_step_of_a_death() -> None:
    error = verdict(worker(0, 6, PeerLost("rank 1 is lost")), worker(1, 4, is_dead=True), worker(2, 6, Aborted("...")))
    assert isinstance(error, RunFailed)
    assert str(error) == "worker 1 (process 101) died during step 7"


def test_nobody_knows_the_step_of_an_asynchronous_death_exactly() -> None:
    members = worker(0, 60), worker(1, 4, is_dead=True)
    assert str(verdict(*members, is_synchronous=False)) == "worker 1 (process 101) died during step 5 or shortly after"


def test_death_before_training() -> None:
    assert str(verdict(worker(0, 0, is_dead=True), is_training=False)).endswith("died before training began")


def test_death_comes_before_other_failures() -> None:
    members = worker(0, 3, ValueError("a consequence in the script")), worker(1, 3, is_dead=True)
    assert str(verdict(*members)) == "worker 1 (process 101) died during step 4"


def test_cause_comes_before_its_consequences() -> None:
    consequences = worker(0, 3, PeerLost("rank 2 is lost")), worker(1, 3, Aborted("..."))
    error = verdict(*consequences, worker(2, 2, OSError("no file")))
    assert str(error).splitlines()[0] == "worker 2 (process 102) failed after step 2: OSError: no file"
    assert "rank 2 is lost" not in str(error)


@pytest.mark.parametrize("ask", [lambda: bytearray(1 << 62), lambda: torch.empty(1 << 60)])
def test_memory_that_runs_out_names_whose(ask: Callable[[], object]) -> None:
    """As Python says it, and as torch does."""
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        ask()
    text = str(verdict(worker(0, 3, PeerLost("rank 1 is lost")), worker(1, 3, raised.value)))
    assert text.startswith("worker 1 (process 101) failed after step 3: it has run out of memory; use smaller batches")
    assert not outcome_of(RuntimeError("memory format"), num_steps=0).is_memory


def test_torchs_own_errors_get_a_remedy() -> None:
    with pytest.raises(ValueError, match="Default process group") as told:
        DistributedDataParallel(torch.nn.Linear(1, 1))
    assert "leave DistributedDataParallel out" in outcome_of(told.value, num_steps=0).message
    assert outcome_of(ValueError("another"), num_steps=0).message == "another"
    assert outcome_of(KeyError("RANK"), num_steps=0).message.startswith("'RANK'. If that is torchrun's variable")
    assert outcome_of(KeyError("rank"), num_steps=0).message == "'rank'"
    dead = judge([worker(1, 3, is_dead=True)], is_training=True, is_synchronous=True, besides=", and the kernel")
    assert str(dead).endswith("or shortly after, and the kernel")


def test_what_all_say_alike_is_nobodys_in_particular() -> None:
    error = verdict(worker(0, 0, UsageError("no such metric")), worker(1, 0, UsageError("no such metric")))
    assert isinstance(error, UsageError)
    assert str(error) == "no such metric"


def test_usage_error_of_one_worker_names_it() -> None:
    error = verdict(worker(0, 2, PeerLost("rank 1 is lost")), worker(1, 2, UsageError("prepare was called twice")))
    assert isinstance(error, UsageError)
    assert str(error) == "worker 1 (process 101) failed after step 2: prepare was called twice"


def test_hanging_worker_is_named_by_those_who_gave_up() -> None:
    error = verdict(worker(0, 4, DeadlineExceeded("rank 1 has not taken part within 5 s")), worker(1, 4))
    assert str(error) == (
        "worker 1 (process 101) hangs after step 4; "
        "worker 0 (process 100) failed after step 4: rank 1 has not taken part within 5 s"
    )


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("single", {}, True),
        ("all-reduce", {}, True),
        ("ps-bsp", {}, True),
        ("ps-bsp", {"backup_workers": 1}, False),
        ("ps-ssp", {}, False),
        ("ps-asp", {}, False),
    ],
)
def test_which_strategies_keep_workers_in_step(name: str, options: dict[str, int], expected: bool) -> None:
    assert build(name, options).traits.lock_step is expected


def test_of_those_who_say_the_same_the_one_that_it_is_about_is_named() -> None:
    said = "step 4: the gradient of parameter '0.weight' on rank 1 is not finite"
    error = verdict(*(worker(rank, 3, NonFiniteGradient(said)) for rank in (0, 1, 10)))
    assert str(error) == f"worker 1 (process 101) failed after step 3: {said}"
