"""Runs of one script: an undisturbed one, and others that are struck and judged by it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, final

from paceline.elastic import Elastic
from paceline.engines import striking
from paceline.engines.ray.nodes import connected, connected_to
from paceline.engines.scripting import Script
from paceline.engines.striking import Strike
from paceline.errors import PacelineError, RunFailed, UsageError
from paceline.running import launch
from paceline.running.chaos import judging, launcher, schedule
from paceline.running.chaos.program import StruckProgram
from paceline.running.chaos.schedule import Scene, Schedule
from paceline.running.result import Result
from paceline.strategies import name_of, settings_of
from paceline.strategies.base import Strategy

SCHEDULE_FILE = "schedule.json"
_DEADLINE_S = 60.0
_OF_LAUNCHER = 0.25
"""In so many of the runs the launcher is struck."""
SILENT_S = 10.0
"""Who is silent for so long is ended: far longer than a pause on a busy machine, and shorter than what is deadly."""


class Struck(NamedTuple):
    """A run that was struck."""

    directory: Path
    met: tuple[Strike, ...]
    """Those of its strikes whose place the process came to."""
    distance: float
    """Of its final model from the undisturbed one's, as a share of how far that one has come."""
    wrong: tuple[str, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Campaign:
    """
    Args:
        at_least: workers that are left alive; one, unless given.
        out: a folder for all runs; new or empty.

    Raises:
        UsageError: nobody may die under the strategy, or a setting has no effect or no meaning under it.
    """

    script: Script
    strategy: Strategy
    workers: int
    out: Path
    at_least: int | None = None
    seed: int = 0
    max_steps: int | None = None

    def __post_init__(self) -> None:
        traits = self.strategy.traits
        if not self._strikes_servers and not traits.repeats_steps:
            raise UsageError(
                f"strategy {name_of(self.strategy)}: chaos strikes workers under all-reduce and local updates, as "
                "--elastic has them, and servers with replicas=R, more than R of them"
            )
        if self._strikes_servers and self.at_least is not None:
            raise UsageError(f"--at-least has no effect under {name_of(self.strategy)}, where servers are struck")
        if not self._strikes_servers and not 1 <= self._least < self.workers:
            raise UsageError(f"--at-least {self._least} of --workers {self.workers} leaves nobody to be struck")
        if self.max_steps is not None and not traits.lock_step:
            raise UsageError(
                f"--max-steps under {name_of(self.strategy)}: runs would end with other samples, and cannot be "
                "compared; have the script train for fewer epochs"
            )
        if self.out.exists() and any(self.out.iterdir()):
            raise UsageError(f"--out {self.out} is not empty; give a new folder")

    @property
    def _least(self) -> int:
        return 1 if self.at_least is None else self.at_least

    def runs(self, *, kills: int, given: Schedule | None = None) -> Iterator[Struck]:
        """Runs until so many processes have died, or those of a schedule, which is in `out` before each begins. All are
        on one Ray, since each that is started here leaves descriptors in this process.

        Raises:
            UsageError: the schedule strikes workers where servers are to be struck, or the other way round.
            RunFailed: the undisturbed run fails, or runs end before their strikes come.
        """
        if given is not None:
            given.require(self._struck_ones)
        with connected(None, num_workers=self.workers):
            yield from self._runs(kills, given)

    @property
    def _strikes_servers(self) -> bool:
        return self.strategy.traits.num_replicas > 0

    @property
    def _struck_ones(self) -> str:
        return "server" if self._strikes_servers else "worker"

    def _runs(self, kills: int, given: Schedule | None) -> Iterator[Struck]:
        whole = self._run("undisturbed", Scene(()))
        calls = judging.calls(whole, f"{self._struck_ones}-")
        chance, scenes, died, idle, num_met = Random(self.seed), list[Scene](), 0, 0, 0
        while len(scenes) < len(given.scenes) if given is not None else died < kills:
            scene = given.scenes[len(scenes)] if given is not None else self._drawn(chance, calls, kills - died)
            scenes.append(scene)
            Schedule(tuple(scenes)).write(self.out / SCHEDULE_FILE)
            struck = self._struck(f"run-{len(scenes)}", scene, whole)
            idle = 0 if struck.met else idle + 1
            if idle > 5:
                raise RunFailed(f"{idle} runs ended before they were struck; have the script train for longer")
            num_met += len(struck.met)
            died += sum(strike.is_deadly for strike in struck.met)
            yield struck
        if not num_met:
            raise RunFailed("no run came to where the schedule strikes; give one of this script and these settings")

    def _drawn(self, chance: Random, calls: schedule.Calls, left: int) -> Scene:
        if chance.random() < _OF_LAUNCHER:
            return schedule.of_launcher(chance)
        if self._strikes_servers:
            return schedule.of_servers(chance, calls, most=min(left, self.strategy.traits.num_replicas))
        return schedule.of_workers(chance, calls, most=min(left, self.workers - self._least))

    def _struck(self, name: str, scene: Scene, whole: Path) -> Struck:
        before = judging.num_descriptors()
        folder = self.out / name
        by_launcher = any(strike.who == "launcher" for strike in scene.strikes)
        try:
            if by_launcher:
                self._run_detached(name, scene, num_iterations=Result(whole / "out").iteration)
            else:
                self._run(name, scene)
            failure = ""
        except PacelineError as error:
            failure = f"the run failed: {error}"
        met = striking.met(scene.strikes, folder)
        judge = judging.launcher if by_launcher else judging.losses
        wrong = [failure] if failure else judge(folder, met)
        distance = float("nan")
        if not failure:
            distance = judging.distance(folder, whole)
            wrong += judging.apart(distance, self.strategy.traits)
            if self._strikes_servers and not by_launcher:
                wrong += judging.gradients(folder, whole, met)
            elif not by_launcher:
                wrong += judging.samples(folder, whole)
        return Struck(folder, met, distance, (*wrong, *judging.left(folder, before)))

    def _run_detached(self, name: str, scene: Scene, *, num_iterations: int) -> None:
        folder = self._folder(name, scene)
        given: dict[str, object] = {
            "--strategy": name_of(self.strategy),
            "--workers": self.workers,
            "--seed": self.seed,
            "--device": "cpu",
            "--deadline": _DEADLINE_S,
            "--address": connected_to(),
            "--checkpoint-every": max(1, num_iterations // 10),
        }
        if self.max_steps is not None:
            given["--max-steps"] = self.max_steps
        options = [part for setting in settings_of(self.strategy).items() for part in ("--option", "=".join(setting))]
        plain = [str(part) for setting in given.items() for part in setting]
        with _struck_in(folder):
            launcher.run([self.script.path, *plain, *options, "--", *self.script.arguments], out=folder / "out")

    def _folder(self, name: str, scene: Scene) -> Path:
        folder = self.out / name
        for each in ("calls", "struck", "committed", "counted"):
            (folder / each).mkdir(parents=True)
        (folder / "strikes.json").write_text(json.dumps([asdict(strike) for strike in scene.strikes]))
        return folder.resolve()

    def _run(self, name: str, scene: Scene) -> Path:
        folder = self._folder(name, scene)
        elastic = Elastic(
            at_least=self._least,
            at_most=self.workers + scene.replacements,
            global_batch="keep" if self.strategy.traits.lock_step else "grow",
            deadline_s=SILENT_S,
            replacements=scene.replacements,
        )
        with _struck_in(folder):
            launch.run(
                self.script if self._strikes_servers else StruckProgram(self.script),
                strategy=self.strategy,
                workers=self.workers,
                elastic=None if self._strikes_servers else elastic,
                seed=self.seed,
                max_steps=self.max_steps,
                device="cpu",
                deadline_s=_DEADLINE_S,
                out=folder / "out",
                watcher=launch.Quiet(),
            )
        return folder


@contextmanager
def _struck_in(folder: Path) -> Iterator[None]:
    """Processes that begin in this context are struck as the folder says."""
    os.environ[striking.VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[striking.VARIABLE]
