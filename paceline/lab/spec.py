"""What a study is asked to do: fixed and checked before anything starts."""

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Any

from paceline.attacks import Attack, parse
from paceline.cluster.placement import place
from paceline.config import DEFAULT_EVAL_EVERY, RunConfig, Target, in_order
from paceline.elastic import Elastic
from paceline.engines.ray.nodes import chosen_address
from paceline.engines.scripting import Script, read_script
from paceline.errors import UsageError
from paceline.interval import Interval
from paceline.lab.variant import Variant
from paceline.lab.virtual_cluster import VirtualCluster
from paceline.running import checks
from paceline.running.variables import variables
from paceline.strategies.base import Strategy
from paceline.strategies.hostility import require_attackable

TUNING_SEED = 1_000_003
_ODD = r"[^\w.=+-]"


def _file_name(text: str) -> str:
    """The text as a file's name. Where letters had to go, a digest keeps texts apart."""
    plain = re.sub(_ODD, "_", text)
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _require_elastic(elastic: Elastic, strategy: Strategy, workers: int, attacks: Sequence[Attack]) -> None:
    """Raises UsageError for a number of workers that such a run cannot have."""
    elastic.require(num_workers=workers)
    elastic.require_each(lambda number: strategy.check(num_workers=number))
    elastic.require_each(lambda number: require_attackable(attacks, strategy.traits.when_elastic, num_workers=number))


_EXTENSIBLE = ("strategies", "workers", "seeds")
_INCIDENTAL = ("script", "address", "insecure", "deadline_s", "start_deadline_s")
"""What may change while a study goes on: where the same script lies, where the cluster is to be found today, and how
long a trial may hang; trials that have finished did not."""


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    variant: Variant
    workers: int
    seed: int
    setting: str = ""
    """Script options that are tried, as `lr=0.1 momentum=0`; empty: the trial is judged."""

    @property
    def id(self) -> str:
        """Unique within the study, and the name of the trial's directory."""
        tried = f"-tune-{_file_name(self.setting)}" if self.setting else ""
        return f"{self.variant.file_name}-n{self.workers}-s{self.seed}{tried}"

    @property
    def label(self) -> str:
        return (
            f"{self.variant.text} x {self.workers} {f'tuning {self.setting}' if self.setting else f'seed {self.seed}'}"
        )


@dataclass(frozen=True)
class LeftOut:
    """A strategy that cannot run with so many workers, which is no error."""

    variant: Variant
    workers: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """One script under every combination of strategy, number of workers and seed. Raises UsageError if a value is
    out of range, comes twice, or no strategy can run with any of the numbers of workers."""

    script: str
    script_sha256: str
    """SHA-256 of the script's text. A study never mixes results of two versions of its script."""
    arguments: tuple[str, ...]
    strategies: tuple[Variant, ...]
    workers: tuple[int, ...]
    seeds: tuple[int, ...]
    target: str | None = None
    passed_targets: tuple[str, ...] = ()
    """Further targets, whose first reaching is shown; they end no run."""
    hold: int | None = None
    after_target: str = "stop"
    tune: tuple[str, ...] = ()
    """Script options with values to try, as `lr=0.01,0.1`: each combination is judged with those that suit it best."""
    attacks: tuple[str, ...] = ()
    """What hostile workers do in every run, as `sign-flip:workers=2`."""
    max_steps: int | None = None
    max_time_s: float | None = None
    eval_every: int | str | None = None
    """As `Interval.parse` reads it, and writes it."""
    device: str = "auto"
    engine: str = "ray"
    cluster: VirtualCluster | None = None
    """What the virtual engine simulates."""
    elastic: str | None = None
    """`MIN:MAX`: workers may die and come, under strategies that can go on without some; the others run without."""
    replace: int | None = None
    """In elastic runs, how often a new worker starts in the place of one that is gone."""
    checkpoint_every: int | None = None
    """Iterations; simulated runs that a failure has ended begin anew from there."""
    deadline_s: float = RunConfig.deadline_s
    """How long any wait for a peer may take."""
    start_deadline_s: float = RunConfig.start_deadline_s
    """How long workers and servers may take to start."""
    address: str | None = None
    """Address of a Ray cluster; none: one is started on this machine. A study may go on at another address."""
    insecure: bool = False
    """The cluster may be one that takes work from anybody, without a token."""
    environment: tuple[str, ...] = ()
    """Variables of workers and servers, as `NAME=VALUE`, or `NAME` for the value where the study is run."""

    def __post_init__(self) -> None:
        for name in _EXTENSIBLE:
            values = [value.text if isinstance(value, Variant) else value for value in getattr(self, name)]
            if not values:
                raise UsageError(f"{name}: give at least one")
            for value in values:
                if values.count(value) > 1:
                    raise UsageError(f"{name}: {value} is given twice")
        if min(self.workers) < 1:
            raise UsageError(f"workers must be at least 1, not {min(self.workers)}")
        checks.check_engine(self.engine, cluster=self.cluster, address=self.address)
        checks.check_environment(self.engine, self.environment)
        if self.eval_every is not None:
            object.__setattr__(self, "eval_every", str(Interval.parse(self.eval_every)))
        for seed in self.seeds:
            self.config(seed)
        checks.elastic_of(self.elastic, None, self.replace, default="keep")
        if self.tune and TUNING_SEED in self.seeds:
            raise UsageError(f"seed {TUNING_SEED} is the one that options are tuned with; judge others")
        _ = self.settings
        if not self.trials:
            raise UsageError("; ".join(out.reason for out in self.left_out))

    @classmethod
    def create(
        cls,
        script: str | Path,
        *,
        strategies: Sequence[str | Strategy],
        workers: Sequence[int],
        seeds: Sequence[int],
        arguments: Sequence[str] = (),
        engine: str = "ray",
        cluster: str | Path | None = None,
        address: str | None = None,
        environment: Mapping[str, str] | Sequence[str] = (),
        target: str | Sequence[str] | None = None,
        eval_every: int | str | None = None,
        **settings: Any,
    ) -> "StudySpec":
        """The spec for a script, and for a cluster's file, as they lie there now; `settings` are the other fields.

        A plain number as `eval_every` counts batches of all workers together, so that all strategies and numbers of
        workers are judged equally often for the same work. So does what it is by default where there is a target.

        Raises:
            UsageError: as the class; or the script cannot be read, is not Python, or never returns the target's metric;
                or the cluster's file is wrong; or something of another kind is given, such as a number for a list.
        """
        if not isinstance(script, str | Path):
            raise UsageError(f"a study takes the path of a script, not {script!r}; functions are for paceline.run")
        program = read_script(script, arguments)
        if isinstance(environment, Mapping):
            environment = [f"{name}={value}" for name, value in environment.items()]
        environment = _several("environment", environment, "['NAME', 'NAME=VALUE']")
        variables(environment)
        targets = _targets(target)
        if eval_every is None and targets:
            eval_every = int(DEFAULT_EVAL_EVERY.every)
        spec = cls(
            script=program.path,
            script_sha256=_digest(program),
            arguments=tuple(arguments),
            strategies=tuple(map(Variant.of, _several("strategies", strategies, "['all-reduce', 'ps-bsp']"))),
            workers=_numbers("workers", workers),
            seeds=_numbers("seeds", seeds),
            engine=engine,
            cluster=VirtualCluster.read(cluster) if cluster is not None else None,
            address=chosen_address(address) if engine == "ray" else address,
            environment=environment,
            target=targets[-1] if targets else None,
            passed_targets=tuple(targets[:-1]),
            eval_every=str(Interval.parse(eval_every, plain="batches")) if eval_every is not None else None,
            **settings,
        )
        for text in targets:
            checks.check_metric(program, Target.parse(text))
        return spec

    def read_script(self) -> Script:
        """The script, for all trials to run. Raises UsageError if it cannot be read or its text has changed."""
        script = read_script(self.script, self.arguments)
        if _digest(script) != self.script_sha256:
            raise UsageError(f"the script {self.script} has changed since this study was made; give another --out")
        return script

    def config(self, seed: int) -> RunConfig:
        return RunConfig(
            max_steps=self.max_steps,
            max_time_s=self.max_time_s,
            checkpoint_every=self.checkpoint_every,
            eval_every=Interval.parse(self.eval_every) if self.eval_every is not None else None,
            target=None if self.target is None else Target.parse(self.target),
            hold=self.hold,
            after_target=self.after_target,  # type: ignore[arg-type]  # RunConfig checks it
            seed=seed,
            device=self.device,  # type: ignore[arg-type]  # RunConfig checks it
            deadline_s=self.deadline_s,
            start_deadline_s=self.start_deadline_s,
            attacks=self.attacks,
        )

    @property
    def targets(self) -> tuple[str, ...]:
        """The last of them ends a run."""
        return (*self.passed_targets, self.target) if self.target is not None else ()

    @property
    def title(self) -> str:
        """The script's name with its arguments."""
        return " ".join([Path(self.script).name, shlex.join(self.arguments)]).strip()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All that can run, a seed after the other, so that early tables hold every combination."""
        left_out = {(out.variant.text, out.workers) for out in self.left_out}
        return tuple(
            Trial(variant, workers, seed)
            for seed in self.seeds
            for variant in self.strategies
            for workers in self.workers
            if (variant.text, workers) not in left_out
        )

    def at(self, point: int) -> Trial:
        """The trial at this place, from 1, which is run alone. Raises UsageError if there is none."""
        if self.tune:
            raise UsageError("--tune needs its runs before those that are judged, so that none can be run alone")
        if not 1 <= point <= len(self.trials):
            raise UsageError(f"the study has runs 1 to {len(self.trials)}, and no {point}")
        return self.trials[point - 1]

    @property
    def settings(self) -> tuple[str, ...]:
        """All that are tried; every combination tries each of them once. Raises UsageError if `tune` is wrong."""
        choices = [_choices(text) for text in self.tune]
        return tuple(" ".join(choice) for choice in product(*choices)) if choices else ()

    @property
    def tuning_trials(self) -> tuple[Trial, ...]:
        """All with the same seed, which is not judged."""
        arms = dict.fromkeys((trial.variant, trial.workers) for trial in self.trials)
        return tuple(Trial(*arm, TUNING_SEED, setting) for arm in arms for setting in self.settings)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        found, attacks = [], parse(self.attacks)
        for variant in self.strategies:
            for workers in self.workers:
                try:
                    variant.strategy.check(num_workers=workers)
                    if self.elastic is not None and variant.strategy.traits.repeats_steps:
                        _require_elastic(Elastic.parse(self.elastic), variant.strategy, workers, attacks)
                    require_attackable(attacks, variant.strategy.traits, num_workers=workers)
                    if self.cluster is not None:
                        num_servers = variant.strategy.traits.num_servers
                        place(self.cluster.content, num_workers=workers, num_servers=num_servers)
                except UsageError as error:
                    found.append(LeftOut(variant, workers, str(error)))
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        cluster = self.cluster.to_json() if self.cluster is not None else None
        return plain | {"strategies": [variant.text for variant in self.strategies], "cluster": cluster}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "StudySpec":
        """The inverse of `to_json`; needs no script. Raises UsageError if it is no spec of this version."""
        try:
            lists = {"arguments": tuple(plain["arguments"]), **{name: tuple(plain[name]) for name in _EXTENSIBLE}}
            lists["attacks"] = tuple(plain.get("attacks", ()))
            lists["tune"] = tuple(plain.get("tune", ()))
            lists["environment"] = tuple(plain.get("environment", ()))
            lists["passed_targets"] = tuple(plain.get("passed_targets", ()))
            lists["strategies"] = tuple(Variant.parse(text) for text in plain["strategies"])
            cluster = VirtualCluster(**plain["cluster"]) if plain.get("cluster") is not None else None
            return cls(**{**plain, **lists, "cluster": cluster})
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not a study of this version of Paceline: {error}") from None

    def command(self, *, out: str | Path) -> list[str]:
        """The command line that runs, or goes on with, this study."""
        options = {
            "--strategies": ",".join(variant.text for variant in self.strategies),
            "--workers": ",".join(map(str, self.workers)),
            "--seeds": _seeds_option(self.seeds),
            "--hold": self.hold,
            "--after-target": None if self.after_target == "stop" else self.after_target,
            "--max-steps": self.max_steps,
            "--max-time": self.max_time_s,
            "--eval-every": self.eval_every,
            "--device": None if self.device == "auto" else self.device,
            "--deadline": _unless(self.deadline_s, RunConfig.deadline_s),
            "--start-deadline": _unless(self.start_deadline_s, RunConfig.start_deadline_s),
            "--engine": None if self.engine == "ray" else self.engine,
            "--cluster": self.cluster.source if self.cluster is not None else None,
            "--elastic": self.elastic,
            "--replace": self.replace,
            "--checkpoint-every": self.checkpoint_every,
            "--address": self.address,
            "--out": out,
        }
        given = [str(part) for option, value in options.items() if value is not None for part in (option, value)]
        return [
            "paceline",
            "compare",
            self.script,
            *given,
            *(part for target in self.targets for part in ("--target", target)),
            *(part for tuned in self.tune for part in ("--tune", tuned)),
            *(part for attack in self.attacks for part in ("--attack", attack)),
            *(part for variable in self.environment for part in ("--env", variable)),
            *(["--insecure"] if self.insecure else []),
            *(["--", *self.arguments] if self.arguments else []),
        ]

    def is_part_of(self, other: "StudySpec") -> bool:
        """Whether no strategy, number of workers or seed is asked for that the other does not have."""
        return all(set(getattr(self, name)) <= set(getattr(other, name)) for name in _EXTENSIBLE)

    def require_same_study(self, earlier: "StudySpec") -> None:
        """Raises UsageError, which names every difference, unless this is the same study as the earlier one, more of it
        or a part."""
        differences = []
        is_part = self.is_part_of(earlier)
        for field in fields(self):
            before, now = getattr(earlier, field.name), getattr(self, field.name)
            if field.name in _EXTENSIBLE:
                if is_part:
                    continue
                missing = [getattr(value, "text", str(value)) for value in before if value not in now]
                if missing:
                    differences.append(f"{field.name} had {', '.join(missing)} as well")
            elif field.name == "script_sha256":
                if before != now:
                    differences.append("the script's text has changed")
            elif field.name == "cluster" and before is not None and now is not None:
                if before != now:
                    differences.append(f"the simulated cluster was {before.source}, now {_other(now, before)}")
            elif field.name not in _INCIDENTAL and before != now:
                differences.append(f"{field.name} was {_shown(before)}, now {_shown(now)}")
        if differences:
            raise UsageError("; ".join(differences))


def _choices(text: str) -> list[str]:
    """`lr=0.01,0.1` as `lr=0.01` and `lr=0.1`."""
    name, sign, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not (name.strip() and sign and found) or any(" " in part for part in (name.strip(), *found)):
        raise UsageError(f"tune {text!r}: give an option of the script with values to try, as lr=0.01,0.03,0.1")
    return [f"{name.strip()}={value}" for value in found]


def _targets(given: str | Sequence[str] | None) -> list[str]:
    """As they were given, the hardest last."""
    texts = [given] if isinstance(given, str) else list(given or ())
    by_target = {Target.parse(text): text for text in texts}
    return [by_target[target] for target in in_order(by_target)]


def _digest(script: Script) -> str:
    return hashlib.sha256(script.source.encode()).hexdigest()


def _several(name: str, values: Any, example: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{name} are given as a list, such as {example}, not as {values!r}")
    return tuple(values)


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    found = _several(name, values, "[1, 2]")
    for value in found:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise UsageError(f"{name} are whole numbers, not {value!r}")
    return tuple(map(int, found))


def parse_seeds(text: str) -> tuple[int, ...]:
    """`3` is three seeds: 0, 1, 2. `3,7` are those two, and `3,` is that one. Raises UsageError for other texts."""
    try:
        if "," in text:
            return tuple(int(part) for part in text.split(",") if part.strip())
        return tuple(range(int(text)))
    except ValueError:
        raise UsageError(f"seeds {text!r}: give how many, as 3, or which, as 0,1,2") from None


def _seeds_option(seeds: tuple[int, ...]) -> str:
    if seeds == tuple(range(len(seeds))):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def _unless(seconds: float, usual: float) -> str | None:
    return None if seconds == usual else f"{seconds:g}"


def _other(now: VirtualCluster, before: VirtualCluster) -> str:
    return f"{now.source} with other settings" if now.source == before.source else now.source


def _shown(value: Any) -> str:
    if isinstance(value, VirtualCluster):
        return value.source
    if isinstance(value, tuple):
        return shlex.join(value) or "empty"
    return "not given" if value is None else str(value)
