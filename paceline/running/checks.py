"""What can be refused before anything starts."""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from paceline.attacks import parse
from paceline.cluster import reading as cluster_file
from paceline.config import Best, RunConfig, Target
from paceline.elastic import Elastic, GlobalBatch
from paceline.engines.scripting import Program, Script
from paceline.errors import UsageError, unknown
from paceline.strategies import name_of
from paceline.strategies.base import Strategy
from paceline.strategies.hostility import require_attackable
from paceline.strategies.traits import Traits
from paceline.training.evaluation import metrics_in

EngineChoice = Literal["ray", "virtual"]
_OF_STRATEGIES = {
    "--max-time": "max_time_s",
    "--eval-every": "eval_every",
    "--checkpoint-every": "checkpoint_every",
    "--keep-checkpoints": "keep_checkpoints",
    "--keep-best": "keep_best",
    "--copy-checkpoints": "copy_checkpoints",
    "--target": "target",
    "--hold": "hold",
    "--after-target": "after_target",
    "--strict": "strict",
    "--attack": "attacks",
}
"""Settings that need a strategy of Paceline's own, which steps and pauses for the script."""


def check_metric(program: Program, wanted: Target | Best | None, *, what: str = "target metric") -> None:
    """Raise UsageError for a metric that the script's text shows it never returns."""
    known = metrics_in(program.source) if isinstance(program, Script) and wanted is not None else None
    if wanted is not None and known is not None and wanted.metric not in known:
        raise unknown(what, wanted.metric, known)


def check_engine(engine: str, *, cluster: object | None, address: str | None) -> None:
    """Raises UsageError if there is no such engine, it lacks something, or something has no effect with it."""
    if engine not in get_args(EngineChoice):
        raise unknown("engine", engine, get_args(EngineChoice))
    if engine == "ray":
        if cluster is not None:
            raise UsageError("a cluster's file has no effect on real machines; add --engine virtual to simulate them")
        return
    if address is not None:
        raise UsageError("--address has no effect with --engine virtual, which runs on this machine")
    if cluster is None:
        known = ", ".join(cluster_file.shipped())
        raise UsageError(f"--engine virtual needs --cluster: a TOML file, or one of {known}")


def check_environment(engine: str, variables: Collection[str]) -> None:
    """Raises UsageError for variables of processes where none are started."""
    if variables and engine == "virtual":
        raise UsageError("--env is for processes that are started; a simulated run has this one's variables")


def elastic_of(
    elastic: str | Elastic | None, global_batch: GlobalBatch | None, replace: int | None, *, default: GlobalBatch
) -> Elastic | None:
    """What an elastic run is asked for. Raises UsageError for values out of range, and for those without effect."""
    if elastic is None:
        if global_batch is not None:
            raise UsageError("--global-batch has no effect without --elastic, since workers stay as many as they are")
        if replace is not None:
            raise UsageError("--replace has no effect without --elastic, where a death ends the run")
        return None
    if not isinstance(elastic, str):
        if global_batch is not None or replace is not None:
            raise UsageError(
                "global_batch and replace go with elastic as text; Elastic(global_batch=..., replacements=...) has its "
                "own"
            )
        return elastic
    return Elastic.parse(elastic, global_batch=global_batch or default, replacements=replace or 0)


def require_survivable(plan: Strategy, elastic: Elastic, *, workers: int) -> None:
    """Raises UsageError, which says why, for runs in which nobody may die or join so far."""
    elastic.require(num_workers=workers)
    traits = plan.traits.when_elastic
    if not traits.survives:
        raise UsageError(
            f"strategy {name_of(plan)} cannot go on without a worker that dies so far. --elastic is for all-reduce, "
            "local updates (local-sgd, slowmo, diloco, des-loc), async-diloco, gossip, sgp, relay, noloco, ad-psgd, "
            "clients (fed-avg, scaffold, fed-buff, ...), and for ps-bsp, ps-ssp and ps-asp without backup_workers, "
            "torn_reads and combine=always. It takes no aggregate that remembers what each one has sent"
        )
    elastic.require_each(lambda number: plan.check(num_workers=number))
    if elastic.global_batch == "keep" and (why := _why_not_kept(plan.traits)):
        raise UsageError(f"--global-batch keep: under {name_of(plan)} {why}; use --global-batch grow")


def _why_not_kept(traits: Traits) -> str:
    """Why updates are not of as many samples as at the start, whoever is there; empty where they can be."""
    if traits.lock_step:
        return ""
    if traits.outlives_workers and not traits.trains_apart:
        return "each gradient is an update of its own, and no global batch is ever complete"
    if traits.num_clients:
        return "a round has the samples of its clients, whoever plays them"
    if traits.meets_anew:
        return "each worker takes its own steps, as many as it has batches"
    return "an exchange is of as many local steps of each worker, whoever is there"


def require_possible_attacks(plan: Strategy, config: RunConfig, *, workers: int) -> None:
    """Raises UsageError for attacks that cannot be made; where workers come and go, by any number that may be left."""
    attacks, elastic = parse(config.attacks), config.elastic
    if elastic is None or plan.traits.num_clients:
        require_attackable(attacks, plan.traits, num_workers=workers)
        return
    elastic.require_each(lambda number: require_attackable(attacks, plan.traits.when_elastic, num_workers=number))


def require_effect(strategy: Strategy, config: RunConfig, others: Mapping[str, bool]) -> None:
    """Raise UsageError for settings of which a script that does all by itself knows nothing; `others` are those beside
    the config, and whether they are given."""
    plain = RunConfig()
    given = {option: getattr(config, name) != getattr(plain, name) for option, name in _OF_STRATEGIES.items()}
    for option, is_given in {**given, **others}.items():
        if is_given:
            raise UsageError(
                f"{option} has no effect under strategy {name_of(strategy)}, whose script exchanges, evaluates and "
                "saves by itself; --max-steps ends it"
            )
