"""`horovod.run`: a function in so many processes, from a notebook or a program."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.horovod.elastic_jobs.launch import ElasticLaunch
from paceline.horovod.elastic_jobs.options import Elastic
from paceline.horovod.hosts import lines_of, parse_hosts
from paceline.horovod.launch import Launch
from paceline.horovod.processes import Job, Ssh

_START_WITHIN_S = 300.0


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in every process, where it may `hvd.init()`; the results by rank.

    Steps of a `DistributedOptimizer` are recorded in a new directory under `runs/`, which is not made where there are
    none.

    Args:
        num_proc: processes; `np`, `min_np` and `max_np` are older names.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script: of an elastic job, as for
            `paceline horovodrun`.
        hosts, hostfile: where they run; otherwise here.
        start_timeout: seconds that workers may take to meet.
        disable_cache, verbose, use_gloo: are taken, and change nothing.

    Raises:
        UsageError: arguments contradict one another, or cannot be had here.
        RunFailed: a process has failed, which ends the others; in an elastic job, nobody can go on.
    """
    _refuse(
        output_filename=output_filename,
        use_mpi=use_mpi,
        mpi_args=mpi_args,
        network_interface=network_interface,
        network_interfaces=network_interfaces,
        executable=executable,
    )
    if hosts is not None and hostfile is not None:
        raise UsageError("give hosts or hostfile, not both")
    texts = hosts.split(",") if hosts is not None else [] if hostfile is None else lines_of(Path(hostfile))
    count = num_proc if np is None else np
    given, named = tuple(args), dict(kwargs or {})
    elastic = Elastic(
        host_discovery_script=host_discovery_script,
        min_num_proc=min_num_proc if min_np is None else min_np,
        max_num_proc=max_num_proc if max_np is None else max_np,
        slots_per_host=slots,
        reset_limit=reset_limit,
        blacklist_cooldown_range=cooldown_range,
    )
    within_s = _START_WITHIN_S if start_timeout is None else start_timeout
    ssh = Ssh(ssh_port, ssh_identity_file)
    # Not above, as workers import this module, and this brings Ray.
    from paceline.running.launched import LaunchedRun
    from paceline.strategies.horovod import Horovod

    settings = elastic.arguments(count, texts) if elastic.is_asked_for else {}
    with LaunchedRun(_name_of(func), [], strategy=Horovod(), num_workers=count) as recorded:
        job = Job(
            lambda: func(*given, **named),
            start_within_s=within_s,
            is_elastic=elastic.is_asked_for,
            keep=recorded.keep,
            note=recorded.note,
        )
        if elastic.is_asked_for:
            return ElasticLaunch(job, ssh=ssh, **settings).run()
        return Launch(job, parse_hosts(texts or [f"localhost:{count}"]), num_proc=count, ssh=ssh).run()


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", repr(func))


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} cannot be had: processes are this Python's, and meet without MPI; leave it out")
