"""Runs of one script: an undisturbed one, and others that are struck and judged by it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, final

from paceline.elastic import GlobalBatch
from paceline.engines import striking
from paceline.engines.ray.nodes import await_hosts, connected, nodes
from paceline.engines.scripting import Script
from paceline.engines.striking import Strike
from paceline.errors import PacelineError, RunFailed, UsageError
from paceline.running.chaos import drawing, gradients, judging
from paceline.running.chaos.roles import Role, roles_of
from paceline.running.chaos.runs import Runs
from paceline.running.chaos.schedule import Scene, Schedule, require_hosts
from paceline.running.result import Result
from paceline.strategies import name_of
from paceline.strategies.base import Strategy
from paceline.strategies.traits import Traits

SCHEDULE_FILE = "schedule.json"
_OF_HOST, _OF_LAUNCHER = 0.5, 0.25
"""In so many of the runs, where there are others than the launcher's, a host is struck; in so many of the rest the
launcher."""
_BACK_S = 300.0
"""Within that a host that was struck is to be there again."""


class Struck(NamedTuple):
    """A run that was struck."""

    directory: Path
    met: tuple[Strike, ...]
    """Those of its strikes whose place the process came to."""
    distance: float
    """How far its final model is from the undisturbed run's, over that one's norm; not a number if the run failed."""
    bound: float
    """How large that may be; infinite where the strategy promises nothing."""
    wrong: tuple[str, ...]

    @property
    def num_died(self) -> int:
        return sum(strike.is_deadly for strike in self.met)


@final
@dataclass(frozen=True, kw_only=True)
class Campaign:
    """
    Args:
        elastic: of servers with copies, workers may die as well; others' runs are elastic in any case.
        at_least: workers that are left alive; one, unless given.
        global_batch: of elastic runs; as such runs have it, unless given.
        start_deadline_s: how long workers and servers may take to start.
        out: a folder for all runs; new or empty.
        address: of a Ray cluster; none: one is started here. Where its other hosts are network namespaces of this
            machine, these are struck.

    Raises:
        UsageError: nobody may die under the strategy, or a setting has no effect or no meaning under it.
    """

    script: Script
    strategy: Strategy
    workers: int
    out: Path
    elastic: bool = False
    at_least: int | None = None
    global_batch: GlobalBatch | None = None
    start_deadline_s: float = 120.0
    seed: int = 0
    max_steps: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        name = name_of(self.strategy)
        if not self._roles:
            raise UsageError(
                f"strategy {name}: chaos strikes workers under all-reduce, local updates, rounds of clients, gossip, "
                "ad-psgd and servers, as --elastic has them, and servers with replicas=R, more than R of them"
            )
        if self.global_batch is not None and not self._is_elastic:
            raise UsageError(f"--global-batch has no effect under {name}, where servers are struck; add --elastic")
        if not self._is_elastic and self.at_least is not None:
            raise UsageError(f"--at-least has no effect under {name}, where servers are struck; --elastic strikes both")
        if self._is_elastic and not 1 <= self._least < self.workers:
            raise UsageError(f"--at-least {self._least} of --workers {self.workers} leaves nobody to be struck")
        if self._traits.num_clients and self.max_steps is None:
            raise UsageError(
                f"strategy {name}: give --max-steps, and have the script train for longer than that: workers that are "
                "left play the turns of the dead, too, and would be through with their epochs in an earlier round"
            )
        if self.max_steps is not None and not (self._traits.lock_step or self._traits.num_clients):
            raise UsageError(
                f"--max-steps under {name}{', of whose workers some die' * self.strategy.traits.lock_step}: runs would "
                "end with other samples, and cannot be compared; have the script train for fewer epochs"
            )
        if self.out.exists() and any(self.out.iterdir()):
            raise UsageError(f"--out {self.out} is not empty; give a new folder")

    @property
    def _least(self) -> int:
        return 1 if self.at_least is None else self.at_least

    @property
    def _is_elastic(self) -> bool:
        return self.elastic or not self.strategy.traits.num_replicas

    @property
    def _keeps(self) -> bool:
        """Whether updates are of as many samples as at the start, whoever dies."""
        keeps = self.strategy.traits.when_elastic.lock_step
        return self._is_elastic and (keeps if self.global_batch is None else self.global_batch == "keep")

    @property
    def _traits(self) -> Traits:
        """The strategy's, in this campaign's runs."""
        traits = self.strategy.traits
        return traits.when_elastic if self._is_elastic and not self._keeps else traits

    @property
    def _roles(self) -> tuple[Role, ...]:
        traits = self.strategy.traits
        return roles_of(traits, is_elastic=self._is_elastic, workers=self.workers, at_least=self._least)

    def runs(self, *, kills: int, given: Schedule | None = None) -> Iterator[Struck]:
        """Runs until so many processes have died, or those of a schedule, which is in `out` before each begins. All are
        on one Ray, since each that is started here leaves descriptors in this process.

        Raises:
            UsageError: the schedule strikes whom these runs do not survive.
            RunFailed: the undisturbed run fails, or runs end before their strikes come.
        """
        if given is not None:
            given.require(self._roles)
        runs = Runs(
            script=self.script,
            strategy=self.strategy,
            workers=self.workers,
            at_least=self._least if self._is_elastic else None,
            global_batch="keep" if self._keeps else "grow",
            start_deadline_s=self.start_deadline_s,
            seed=self.seed,
            max_steps=self.max_steps,
            out=self.out,
        )
        with connected(self.address, num_workers=self.workers):
            yield from self._runs(runs, kills, given)

    def _runs(self, runs: Runs, kills: int, given: Schedule | None) -> Iterator[Struck]:
        whole = runs.make("undisturbed", Scene(()))
        far = judging.on_other_hosts(whole)
        require_hosts(given, far)
        calls = judging.calls(whole)
        hosts = [node.address for node in nodes()]
        chance, scenes, died, idle, num_met = Random(self.seed), list[Scene](), 0, 0, 0
        while len(scenes) < len(given.scenes) if given is not None else died < kills:
            scene = given.scenes[len(scenes)] if given is not None else self._drawn(chance, calls, far, kills - died)
            scenes.append(scene)
            Schedule(tuple(scenes)).write(self.out / SCHEDULE_FILE)
            struck = self._struck(runs, f"run-{len(scenes)}", scene, whole)
            idle = 0 if struck.met else idle + 1
            if idle > 5:
                raise RunFailed(f"{idle} runs ended before they were struck; have the script train for longer")
            num_met += len(struck.met)
            died += struck.num_died
            yield struck
            if any(striking.KINDS[strike.kind].is_of_host for strike in struck.met):
                await_hosts(hosts, within_s=_BACK_S)
        if not num_met:
            raise RunFailed("no run came to where the schedule strikes; give one of this script and these settings")

    def _drawn(self, chance: Random, calls: drawing.Calls, far: Sequence[Sequence[str]], left: int) -> Scene:
        if far and self._is_elastic and chance.random() < _OF_HOST:
            scene = drawing.of_host(chance, calls, self._roles, far, left=left)
            if scene is not None:
                return scene
        if chance.random() < _OF_LAUNCHER:
            return drawing.of_launcher(chance)
        return drawing.of_members(chance, calls, self._roles, left=left)

    def _struck(self, runs: Runs, name: str, scene: Scene, whole: Path) -> Struck:
        before = judging.num_descriptors()
        folder = self.out / name
        by_launcher = any(strike.who == "launcher" for strike in scene.strikes)
        failure = ""
        try:
            if by_launcher:
                runs.make_detached(name, scene, num_iterations=Result(whole / "out").iteration)
            else:
                runs.make(name, scene)
        except PacelineError as error:
            failure = f"the run failed: {error}"
        met = striking.met(scene.strikes, folder)
        bound, has_clients = self._bound(folder, met), self.strategy.traits.num_clients > 0
        wrong, distance = [failure] if failure else [], float("nan")
        if not failure:
            distance = judging.distance(folder, whole, has_clients=has_clients)
            wrong = judging.launcher(folder, met) if by_launcher else self._lost(folder, whole, met)
            wrong += judging.apart(distance, bound)
            wrong += judging.kept(folder, whole) if has_clients else []
        return Struck(folder, met, distance, bound, (*wrong, *judging.left(folder, before)))

    def _bound(self, folder: Path, met: Sequence[Strike]) -> float:
        """While no worker dies, an elastic run is as another one. All die with the launcher, and others go on."""
        dead = judging.dying(folder, met)
        workers_die = self._is_elastic and any(who.startswith(("worker", "launcher")) for who in dead)
        return judging.bound(self._traits if workers_die else self.strategy.traits, workers_die=workers_die)

    def _lost(self, folder: Path, whole: Path, met: Sequence[Strike]) -> list[str]:
        """A line for each member that was lost unstruck, and for what does not count as in the undisturbed run."""
        lost, traits = judging.losses(folder, met), self.strategy.traits
        if traits.num_clients:
            return lost + judging.rounds(folder, whole)
        if traits.meets_anew:
            return lost + gradients.of_steps(folder, whole)
        if not traits.num_servers:
            return lost + judging.samples(folder, whole)
        if not self._is_elastic:
            return lost + gradients.counted_alike(folder, whole, met)
        return lost + gradients.of_samples(folder, whole, met, unit=traits.unit, keeps=self._keeps)
