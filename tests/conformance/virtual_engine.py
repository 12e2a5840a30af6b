"""The virtual engine with the arguments of the fast one, so that the same checks run over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint import FILE_NAME
from paceline.cluster.description import Cluster, Compute, Hosts, Servers
from paceline.engines.standing import Progress, Watcher
from paceline.engines.virtual.engine import VirtualRun
from paceline.engines.virtual.job import VirtualJob
from paceline.errors import RunFailed, UsageError
from paceline.records import Record
from paceline.running.result import Result
from paceline.strategies import build
from paceline.strategies.base import Strategy
from tests.conformance.settings import config_of

CLUSTER = Cluster(
    hosts=(Hosts(count=8, bandwidth_gbit_per_s=1.0),),
    compute=Compute(step_s=1e-3, distribution="log-normal", variation=0.2),
)


OTHERS_TIME_S = 0.1
SHORT_S = 0.05


class Silent:
    """Watches without a word."""

    def on_progress(self, progress: Progress) -> None:
        pass

    def on_output(self, who: str, line: str) -> None:
        pass

    def on_records(self, records: Sequence[Record]) -> None:
        pass


def wait_until(is_so: Callable[[], bool]) -> None:
    """A script sleeps for many steps of the others: simulated time says without a look what they will have done."""
    time.sleep(OTHERS_TIME_S)


def run(
    program: Callable[[], Any],
    *,
    strategy: str | Strategy,
    workers: int,
    out: Path,
    options: Mapping[str, Any] | None = None,
    resume: Path | None = None,
    servers_are_local: bool = False,
    cluster: Cluster = CLUSTER,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Result:
    """As `local_engine.run`; servers that are local share the workers' one host.

    Raises:
        RunFailed: a worker failed, whatever with.
    """
    if servers_are_local:
        hosts = Hosts(count=1, workers=8, bandwidth_gbit_per_s=1.0)
        cluster = Cluster(hosts=(hosts,), compute=cluster.compute, servers=Servers(placement="with workers"))
    plan = build(strategy, options) if isinstance(strategy, str) else strategy
    plan.check(num_workers=workers)
    config = config_of(**settings)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = (resume / FILE_NAME).read_bytes() if resume is not None else None
    try:
        VirtualRun(VirtualJob(program, plan, workers, cluster, config, checkpoint), out, watcher or Silent()).run()
    except UsageError as error:
        raise RunFailed(f"{type(error).__name__}: {error}") from error
    return Result(out)
