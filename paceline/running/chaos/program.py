"""A script whose worker is struck, and which writes down what all have committed."""

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.engines import striking
from paceline.engines.ray.reforming import Reforming
from paceline.engines.scripting import Script, run_program
from paceline.engines.striking import Place
from paceline.engines.world import current
from paceline.strategies.exchange import Exchange
from paceline.strategies.outer_model import OuterModel
from paceline.strategies.overlap import Overlap
from paceline.strategies.repeating import Repeating
from paceline.training.batches import Batches
from paceline.training.elastic import Survivor
from paceline.training.joining import States
from paceline.training.pauses import Pauses
from paceline.training.sharding.dealt import Dealt

OFTEN: Mapping[str, Place] = {
    "is between steps": (Batches, "_on_return"),
    "is in a pause": (Pauses, "meet"),
    "has gradients": (Repeating, "keep"),
    "gives its part": (Exchange, "start"),
    "waits for gradients": (Overlap, "end"),
    "waits for changes": (OuterModel, "wait"),
    "has the result": (Survivor, "commit"),
}
AFTER_A_DEATH: Mapping[str, Place] = {"has stopped": (Reforming, "_told"), "goes on with others": (Dealt, "resize")}
AT_A_JOIN: Mapping[str, Place] = {"gives its state": (Reforming, "give")}
AS_JOINER: Mapping[str, Place] = {"takes a state": (States, "_entered")}
PLACES = {**OFTEN, **AFTER_A_DEATH, **AT_A_JOIN, **AS_JOINER}


@final
@dataclass(frozen=True, repr=False)
class StruckProgram:
    """What each worker runs."""

    script: Script

    def __repr__(self) -> str:
        return self.script.path

    def __call__(self) -> None:
        world = current()
        assert world is not None
        who, num_commits = f"worker-{world.context.rank}", [0]
        _write_down(who, num_commits)
        # A death before the first step ends a run; who joins has not made one.
        striking.arm(who, PLACES, may_strike=lambda place: num_commits[0] > 0 or place in AS_JOINER)
        run_program(self.script)


def _write_down(who: str, num_commits: list[int]) -> None:
    """Which samples each committed step was made of, all workers' together, and how many these are so far."""
    path = Path(os.environ[striking.VARIABLE], "committed", who)
    commit = Survivor.commit

    @functools.wraps(commit)
    def written(survivor: Survivor) -> bool:
        samples = [sample for dealt in survivor.under_way for part in dealt.parts for sample in part]
        is_complete = commit(survivor)
        num_commits[0] += 1
        with path.open("a") as file:
            print(json.dumps([survivor.samples, samples], default=str), file=file)
        return is_complete

    setattr(Survivor, "commit", written)  # noqa: B010 - a method is not to be assigned
