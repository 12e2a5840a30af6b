"""Which survivor a worker of an elastic run has, by what its strategy can do when somebody dies."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from paceline.checkpoint import Checkpoint
from paceline.elastic import Elastic
from paceline.training.anew import Anew, OwnStates
from paceline.training.checkpoints import Checkpoints
from paceline.training.course import Course
from paceline.training.elastic import Survivor
from paceline.training.entering import Entering
from paceline.training.joining import States
from paceline.training.outlived import Outlived
from paceline.training.pauses import Pauses
from paceline.training.redealt import Redealt
from paceline.training.surviving import Surviving
from paceline.training.whole_batches import WholeBatches
from paceline.training.worker_run import WorkerRun


class Parts(NamedTuple):
    """What a worker's run is made of, as far as a survivor has to know."""

    pauses: Pauses
    checkpoints: Checkpoints
    course: Course
    on_taken: Callable[[Checkpoint], None]
    """Told what the script goes on from, when it comes to the place in its data."""


Connect = Callable[[Parts], None]
"""Gives the survivor what is made after it."""


def survivor_of(run: WorkerRun) -> tuple[Surviving | None, Connect]:
    """Make the survivor, tell the run's context of it, and say what gives it the parts that are made later. Where
    nobody can come or leave, there is none."""
    elastic, traits = run.config.elastic, run.traits
    if elastic is None or run.context.reform is None:
        return None, lambda parts: None
    if traits.outlives_workers:
        return _with_servers(run, elastic)
    if traits.meets_anew:
        return _with_own_model(run)
    return _with_clients(run) if traits.num_clients else _with_repeated_steps(run, elastic)


def _with_servers(run: WorkerRun, elastic: Elastic) -> tuple[Surviving, Connect]:
    outlived = Outlived(run)
    run.context = replace(run.context, done=outlived.done)
    whole: WholeBatches | None = None
    if elastic.global_batch == "keep" or not run.traits.joins_by_mean:
        whole = WholeBatches(run, outlived, elastic.global_batch)
        run.context = replace(run.context, done=whole.done, rounds=whole)

    def connect(parts: Parts) -> None:
        outlived.entering = entering = Entering(run, parts.pauses, parts.checkpoints, on_taken=parts.on_taken)
        if whole is not None:
            entering.state_of_data, entering.take_up_data = whole.state, whole.take_up

    return outlived if whole is None else whole, connect


def _with_own_model(run: WorkerRun) -> tuple[Surviving, Connect]:
    anew = Anew(run)
    run.context = replace(run.context, done=anew.done, reunion=anew)

    def connect(parts: Parts) -> None:
        anew.states = OwnStates(run, parts.pauses, parts.checkpoints, on_taken=parts.on_taken)

    return anew, connect


def _with_clients(run: WorkerRun) -> tuple[Surviving, Connect]:
    redealt = Redealt(run)
    run.context = replace(run.context, redealing=redealt)

    def connect(parts: Parts) -> None:
        redealt.states = States(run, redealt, parts.pauses, parts.checkpoints, on_taken=parts.on_taken)

    return redealt, connect


def _with_repeated_steps(run: WorkerRun, elastic: Elastic) -> tuple[Surviving, Connect]:
    repeating = Survivor(run, elastic)
    run.context = replace(run.context, recovery=repeating)

    def connect(parts: Parts) -> None:
        repeating.states = States(run, repeating, parts.pauses, parts.checkpoints, on_taken=parts.on_taken)
        repeating.on_joined = parts.pauses.compare_soon
        repeating.end_pass = parts.course.end_pass

    return repeating, connect
