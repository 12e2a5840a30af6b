"""One run of a campaign, in a folder that says how it is struck."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from paceline.elastic import Elastic, GlobalBatch
from paceline.engines import striking
from paceline.engines.ray.nodes import connected_to
from paceline.engines.scripting import Script
from paceline.engines.striking import hosts
from paceline.running import launch
from paceline.running.chaos import launcher
from paceline.running.chaos.program import StruckProgram, exchanges_with
from paceline.running.chaos.schedule import Scene
from paceline.strategies import name_of, settings_of
from paceline.strategies.base import Strategy

_DEADLINE_S, _PATIENCE_S = 60.0, 300.0
SILENT_S = 10.0
"""Who is silent for so long is ended: far longer than a pause on a busy machine, and shorter than what is deadly."""
_FOLDERS = ("calls", "struck", "committed", "pushed", "counted", "networks")


@final
@dataclass(frozen=True, kw_only=True)
class Runs:
    """
    Args:
        at_least: workers that are left alive; none: the runs are not elastic, and no worker dies.
        global_batch: of elastic runs.
        start_deadline_s: how long workers and servers may take to start.
        out: a folder for all runs.
    """

    script: Script
    strategy: Strategy
    workers: int
    at_least: int | None
    global_batch: GlobalBatch
    start_deadline_s: float
    seed: int
    max_steps: int | None
    out: Path

    def make(self, name: str, scene: Scene) -> Path:
        """A run of this process's; its folder. Raises RunFailed if it fails."""
        folder = self._folder(name, scene)
        with _struck_in(folder):
            launch.run(
                self._program,
                strategy=self.strategy,
                workers=self.workers,
                elastic=self._elastic(scene),
                seed=self.seed,
                max_steps=self.max_steps,
                device="cpu",
                deadline_s=_DEADLINE_S,
                start_deadline_s=self.start_deadline_s,
                out=folder / "out",
                watcher=launch.Quiet(),
            )
        return folder

    @property
    def _program(self) -> Script | StruckProgram:
        if self.at_least is None:
            return self.script
        return StruckProgram(self.script, exchanges_with(self.strategy.traits))

    def _elastic(self, scene: Scene) -> Elastic | None:
        if self.at_least is None:
            return None
        return Elastic(
            at_least=self.at_least,
            at_most=self.workers + scene.replacements + scene.num_grown,
            global_batch=self.global_batch,
            deadline_s=SILENT_S,
            replacements=scene.replacements,
        )

    def make_detached(self, name: str, scene: Scene, *, num_iterations: int) -> Path:
        """A run that a launcher of its own keeps, which can be struck; its folder. Of an elastic run nobody else dies.
        Raises RunFailed if it fails."""
        folder = self._folder(name, scene)
        given: dict[str, object] = {
            "--strategy": name_of(self.strategy),
            "--workers": self.workers,
            "--seed": self.seed,
            "--device": "cpu",
            "--deadline": _DEADLINE_S,
            "--start-deadline": self.start_deadline_s,
            "--address": connected_to(),
            "--checkpoint-every": max(1, num_iterations // 10),
        }
        if self.max_steps is not None:
            given["--max-steps"] = self.max_steps
        if self.at_least is not None:
            given |= {"--elastic": f"{self.at_least}:{self.workers}", "--global-batch": self.global_batch}
        options = [part for setting in settings_of(self.strategy).items() for part in ("--option", "=".join(setting))]
        plain = [str(part) for setting in given.items() for part in setting]
        with _struck_in(folder):
            arguments = [self.script.path, *plain, *options, "--", *self.script.arguments]
            launcher.run(arguments, out=folder / "out", patience_s=_PATIENCE_S + self.start_deadline_s)
        return folder

    def _folder(self, name: str, scene: Scene) -> Path:
        folder = (self.out / name).resolve()
        for each in _FOLDERS:
            (folder / each).mkdir(parents=True)
        (folder / "networks" / "launcher").write_text(str(hosts.network()))
        least = self.workers if self.at_least is None else self.at_least
        servers = self.strategy.traits.num_servers + scene.num_servers_more
        striking.Sizes(self.workers + scene.num_grown, least + scene.num_workers_dying, servers).write(folder)
        (folder / "strikes.json").write_text(json.dumps([asdict(strike) for strike in scene.strikes]))
        return folder


@contextmanager
def _struck_in(folder: Path) -> Iterator[None]:
    """Processes that begin in this context are struck as the folder says."""
    os.environ[striking.VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[striking.VARIABLE]
