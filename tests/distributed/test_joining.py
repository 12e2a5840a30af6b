"""Workers join a run that trains, and leave it: nothing is lost, and the model is the undisturbed one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest

from paceline.engines import requests
from paceline.errors import RunFailed, UsageError
from tests.distributed.harness import is_training, wait_until
from tests.distributed.test_elastic import (
    SCRIPT,
    events,
    of,
    require_each_sample_once,
    require_same_model,
    trained,
    undisturbed,
)

pytestmark = pytest.mark.ray


def scale(directory: Path, workers: int) -> str:
    return requests.ask(directory, {"do": "scale", "workers": workers})


@contextmanager
def meanwhile(
    directory: Path,
    numbers: Mapping[int, int],
    *,
    comes: Sequence[str] = ("ready",),
    unrecorded: int = 0,
    at_start: int = 2,
) -> Iterator[list[str]]:
    """At each of these iterations, before which all wait, asks for so many workers; gives what was answered.

    Args:
        comes: the events that say of a new one that it is there, or will not be.
        unrecorded: steps before an iteration that may have no record while all wait, since their workers know of
            others' meanwhile.
        at_start: workers that the run begins with.
    """
    out, said, failures = directory / "out", list[str](), list[BaseException]()

    def coming() -> int:
        return len({event["who"] for name in comes for event in of(out, name)})

    def ask() -> None:
        try:
            assert wait_until(lambda: out.exists() and is_training(out))
            for iteration, number in numbers.items():
                recorded = iteration - unrecorded
                assert wait_until(lambda i=recorded: max(iterations_of(out), default=0) >= i)
                before, size = coming(), num_workers(out, at_start=at_start) + len(waiting(out))
                said.append(scale(out, number))
                wanted = before + max(0, number - size)
                assert wait_until(lambda wanted=wanted: coming() >= wanted)
                (directory / "log" / f"go-{iteration}").touch()
        except BaseException as failure:
            failures.append(failure)
            for iteration in numbers:
                (directory / "log" / f"go-{iteration}").touch()

    thread = threading.Thread(target=ask)
    thread.start()
    yield said
    thread.join()
    assert not failures, failures


def num_workers(out: Path, *, at_start: int) -> int:
    """As of the last change."""
    found = of(out, "reformed")
    return len(found[-1]["details"]["ranks"]) if found else at_start


def joined(out: Path) -> list[int]:
    return [rank for event in of(out, "reformed") for rank in event["details"]["joined"]]


def waiting(out: Path) -> set[str]:
    """Who is there, and not yet among those that train."""
    return {event["who"] for event in of(out, "ready")} - {f"worker-{rank}" for rank in joined(out)}


def iterations_of(out: Path, *, rank: int | None = None) -> list[int]:
    """Of the steps that are recorded: this worker's, or all. Those of the last half second may not be yet."""
    path = out / "steps.csv"
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    found = [row.split(",") for row in rows if row.count(",") > 2]
    return [int(row[2]) for row in found if rank is None or row[0] == str(rank)]


def held(*iterations: int) -> list[object]:
    return [word for iteration in iterations for word in ("--hold", iteration)]


def require_undisturbed(out: Path, *, optimizer: str = "momentum") -> None:
    require_each_sample_once(out, epochs=3)
    require_same_model(out, undisturbed(workers=2, epochs=3, optimizer=optimizer))


@pytest.mark.slow
def test_one_joins_and_another_leaves(tmp_path: Path, ray_here: None) -> None:
    """As torchft's test of recovery, and TensorFlow's of a worker that is added."""
    with meanwhile(tmp_path, {5: 3, 20: 2}) as said:
        out = trained(tmp_path, "--epochs", 3, *held(5, 20), workers=2, elastic="1:3")
    assert said == ["2 workers train; 1 more start", "3 workers train; 1 leave after their present step"]
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    assert of(out, "lost") == []
    require_undisturbed(out)
    steps = iterations_of(out, rank=2)
    assert steps == list(range(steps[0], steps[0] + len(steps)))


@pytest.mark.slow
def test_who_leaves_may_leave_too_few_when_another_has_died(tmp_path: Path, ray_here: None) -> None:
    """Three are there, and two are to stay. Then one of them dies in the step after which the third leaves."""
    told = "1 workers are left, and --elastic asks for 2 or more"
    with meanwhile(tmp_path, {5: 2}) as said, pytest.raises(RunFailed, match=told):
        trained(tmp_path, "--epochs", 3, *held(5), "--fail", "1:6:kill", workers=3, elastic="2:3")
    assert said == ["3 workers train; 1 leave after their present step"]
    found = [(event["name"], event["who"]) for event in events(tmp_path / "out")]
    assert [event for event in found if event[0] in ("lost", "left", "failed")] == [
        ("lost", "worker-1"),
        ("left", "worker-2"),
        ("failed", "run"),
    ]


@pytest.mark.slow
def test_who_leaves_owes_nothing(tmp_path: Path, ray_here: None) -> None:
    """Its last exchange has all that anybody owes; those who stay owe again after the next."""
    strategy = "all-reduce:codec=top-k:codec.ratio=0.1:codec_scope=all"
    with meanwhile(tmp_path, {5: 2}):
        out = trained(tmp_path, "--owed", *held(5), workers=3, strategy=strategy, elastic="1:3")
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    require_each_sample_once(out)
    owed = [(tmp_path / "log" / f"owed-{rank}").read_text().split() for rank in range(3)]
    assert [any(map(float, each)) for each in owed] == [True, True, False]


LAYS_OUT = f"""
import functools, runpy, sys
from pathlib import Path

from paceline.engines.ray.reforming import Reforming
from paceline.engines.world import current
from paceline.training.sharding.orders import Orders

path = Path(sys.argv[sys.argv.index("--log") + 1], f"order-{{current().context.rank}}")

def noted(owner, name, told):
    method = getattr(owner, name)

    @functools.wraps(method)
    def with_note(*given, **named):
        with path.open("a") as file:
            print(told(*given[1:], **named), file=file)
        return method(*given, **named)

    setattr(owner, name, with_note)

noted(Orders, "groups", lambda epoch: f"lays out {{epoch}}")
noted(Reforming, "take", lambda *, rank, epoch: f"asks in {{epoch}}")
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_who_joins_lays_out_its_pass_before_it_asks_for_a_state(tmp_path: Path, ray_here: None, strategy: str) -> None:
    """From then on the others may wait for it. It lays out no pass twice, and trains on what it has laid out: a script
    that begins with the first pass goes on to the second, in which the others are. It asks again where they have met
    without it meanwhile."""
    script = tmp_path / "train.py"
    script.write_text(LAYS_OUT)
    with meanwhile(tmp_path, {15: 3}):
        out = trained(
            tmp_path, "--epochs", 3, *held(15), script=script, workers=2, strategy=strategy, elastic="1:3",
            global_batch="keep",
        )  # fmt: skip
    assert joined(out) == [2]
    order = [line for line, _ in groupby((tmp_path / "log" / "order-2").read_text().splitlines())]
    assert order == ["lays out 0", "asks in 0", "lays out 1", "asks in 1", "lays out 2"]
    require_undisturbed(out)


@pytest.mark.slow
def test_any_number_of_resizes_and_a_death(tmp_path: Path, ray_here: None) -> None:
    """Replicas are compared at every step (strict)."""
    given = ["--epochs", 3, *held(5, 15, 25), "--optimizer", "adamw", "--fail", "0:10:kill"]
    with meanwhile(tmp_path, {5: 3, 15: 1, 25: 3}):
        out = trained(tmp_path, *given, workers=2, elastic="1:3", strict=True)
    assert [event["who"] for event in of(out, "lost")] == ["worker-0"]
    assert joined(out) == [2, 3, 4]
    require_undisturbed(out, optimizer="adamw")


@pytest.mark.slow
def test_a_growing_batch_with_a_join(tmp_path: Path, ray_here: None) -> None:
    with meanwhile(tmp_path, {5: 3}):
        out = trained(
            tmp_path, "--epochs", 3, "--samples", 101, "--loaders", 1, *held(5), workers=2, elastic="1:3",
            global_batch="grow",
        )  # fmt: skip
    assert joined(out) == [2]
    require_each_sample_once(out, epochs=3, samples=101)


@pytest.mark.slow
def test_who_dies_is_replaced(tmp_path: Path, ray_here: None) -> None:
    """As TensorFlow's test of a worker that is preempted and started again. It evaluates when the others do."""
    with meanwhile(tmp_path, {8: 2}):
        out = trained(
            tmp_path, "--epochs", 3, "--fail", "1:4:kill", *held(8), workers=2, elastic="1:2", replace=1, eval_every=3
        )
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert joined(out) == [2]
    require_undisturbed(out)


@pytest.mark.slow
def test_who_fails_to_join_leaves_the_run_unharmed_and_is_named(tmp_path: Path, ray_here: None) -> None:
    """At its start, and while it takes the state; the others repeat nothing but the switch."""
    ways = ["raise", "import", "taking", "stopped", "another model"]
    given = [word for rank, when in enumerate(ways, start=2) for word in ("--fail-to-join", f"{rank}:{when}")]
    with meanwhile(tmp_path, {5: 7}, comes=("ready", "not_joined")):
        out = trained(tmp_path, "--epochs", 3, *given, *held(5), workers=2, elastic="1:7")
    why = {event["who"]: event["details"]["why"] for event in of(out, "not_joined")}
    assert why["worker-2"] == "ImportError: no module of this name here"
    assert [why[f"worker-{rank}"] for rank in (3, 4)] == ["its process ended"] * 2
    assert re.fullmatch(r"it was silent for \d+\.\d s and was ended", why["worker-5"])
    assert "the checkpoint is of another model" in why["worker-6"]
    assert joined(out) == []
    require_undisturbed(out)


@pytest.mark.slow
def test_who_gives_its_state_dies_and_the_next_one_gives(tmp_path: Path, ray_here: None) -> None:
    """A member that fails while another recovers from it."""
    with meanwhile(tmp_path, {5: 3}):
        out = trained(tmp_path, "--epochs", 3, "--fail-giving", 0, *held(5), workers=2, elastic="1:3")
    assert [event["who"] for event in of(out, "lost")] == ["worker-0"]
    assert joined(out) == [2]
    require_undisturbed(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"workers": 2}, {"workers": 1, "elastic": "1:3"}),
        ({"workers": 2, "elastic": "1:2", "die": True}, {"workers": 3, "elastic": "1:3", "die": True}),
    ],
    ids=["a static run with one less", "in the middle of an epoch dealt anew, with one more than were left at the end"],
)
def test_another_number_of_workers_goes_on_from_a_checkpoint(tmp_path, ray_here, before, after) -> None:
    """The same updates, to rounding, whatever the numbers of workers before and after."""

    def part(directory: Path, *given: object, die: bool = False, **options: object) -> Path:
        directory.mkdir()
        fails = ["--fail", "1:4:kill"] if die else []
        return trained(directory, "--epochs", 3, *fails, *given, **options)

    first = part(tmp_path / "a", **before, max_steps=17)
    out = part(tmp_path / "b", **after, resume=first)
    require_same_model(out, undisturbed(workers=2, epochs=3))
    evaluations = (out / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluations[-1])["samples"] == 3 * 96


@pytest.mark.slow
@pytest.mark.parametrize(
    ("elastic", "words"),
    [
        ("2:3", "the run was started with --elastic 2:3, and so has 2 to 3 workers"),
        (None, "the run was started without --elastic MIN:MAX"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, ray_here: None, elastic: str | None, words: str) -> None:
    refused: list[str] = []

    def ask() -> None:
        try:
            assert wait_until(lambda: out.exists() and is_training(out))
            for number in (4, 1):
                with pytest.raises(UsageError) as found:
                    scale(out, number)
                refused.append(str(found.value))
        finally:  # else the run would wait for it
            (tmp_path / "log" / "go-3").touch()

    out, thread = tmp_path / "out", threading.Thread(target=ask)
    thread.start()
    trained(tmp_path, *held(3), workers=2, elastic=elastic)
    thread.join()
    assert [words in each for each in refused] == [True, True]
    with pytest.raises(UsageError, match=r"no run is under way in .*: it has ended"):
        scale(out, 3)


@pytest.mark.slow
def test_an_interrupt_during_a_join_leaves_nothing(start, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    log.mkdir()
    command = start(
        "run", SCRIPT, "--workers", 2, "--elastic", "1:3", "--out", out, "--", "--epochs", 5000,
        "--fail-to-join", "2:stopped", "--log", log,
    )  # fmt: skip
    assert wait_until(lambda: is_training(out))
    assert "1 more start" in start("scale", out, "--workers", 3).wait()
    assert wait_until(lambda: of(out, "ready"))
    command.interrupt()
    output = command.wait()
    assert command.status == 130, output
    assert "interrupted; saved at iteration" in output
    command.assert_nothing_left()
