"""Some schedulers start a command on every host of a job. Only the first host runs it, with what the job asks for; the
others lend their cores."""

import os
import socket

from rich.console import Console

from paceline.engines.ray.nodes import chosen_address
from paceline.engines.scripting import Script, is_of_horovod
from paceline.scheduler import from_environment, sagemaker

STRATEGY = "all-reduce"
"""Where nobody asks for another, and the script does not exchange by itself."""


def default_strategy(script: Script) -> str:
    return "horovod" if is_of_horovod(script) else STRATEGY


def is_lent(console: Console, *, engine: str, address: str | None, next_s: float = 0.0) -> bool:
    """Whether this host is not the job's first, and so was lent to what that one runs, which has ended.

    Args:
        next_s: how long after the end of one Ray cluster there may be another.

    Raises:
        UsageError: as the host takes part; or the environment contradicts itself.
        RunFailed: as the host takes part.
    """
    if engine != "ray" or chosen_address(address) is not None:
        return False
    allocation = from_environment(os.environ, socket.gethostname())
    if allocation is None or allocation.here == 0:
        return False
    from paceline.engines.ray.meeting_host import take_part

    own, first = allocation.hosts[allocation.here], allocation.hosts[0]
    console.print(f"{own} works for {first}, and ends with its run", markup=False, highlight=False)
    take_part(allocation, next_s=next_s)
    return True


def asked(console: Console, strategy: str | None, workers: int | None, *, default: str = STRATEGY) -> tuple[str, int]:
    """Strategy and workers: those given, else what SageMaker's settings ask for, else the script's default and one.

    Raises:
        UsageError: the settings cannot be read.
    """
    allocation = sagemaker.from_sagemaker(os.environ)
    wanted = sagemaker.wanted(os.environ, len(allocation.hosts)) if allocation is not None else None
    if wanted is not None:
        theirs = default if wanted.strategy == STRATEGY else wanted.strategy
        strategy = theirs if strategy is None else strategy
        workers = wanted.workers if workers is None else workers
        said = f"SageMaker's setting {wanted.setting}: --strategy {strategy} --workers {workers}"
        console.print(said, markup=False, highlight=False)
    return default if strategy is None else strategy, 1 if workers is None else workers
