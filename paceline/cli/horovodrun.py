"""`paceline horovodrun`: the command line of Horovod's launcher, for `paceline run --strategy horovod`."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""What follows the command is its own."""

_MEBIBYTE = 2**20
_ELASTIC = "jobs that grow and shrink are not there yet; give -np alone"
_REFUSED = {
    "--host-discovery-script": _ELASTIC,
    "--min-num-proc": _ELASTIC,
    "--max-num-proc": _ELASTIC,
    "--slots-per-host": _ELASTIC,
    "--elastic-timeout": _ELASTIC,
    "--reset-limit": _ELASTIC,
    "--blacklist-cooldown-range": _ELASTIC,
    "--config-file": "give its settings as options",
    "--mpi": "workers meet without MPI; leave it out",
    "--autotune": "operations are put together by --fusion-threshold-mb, which nothing tunes; leave it out",
    "--stall-check-shutdown-time-seconds": "a stall is warned of, and ends with the worker that is missing; "
    "leave it out",
}

_Text = Annotated[str | None, typer.Option(hidden=True)]
_Flag = Annotated[bool, typer.Option(hidden=True)]


def horovodrun(
    command: Annotated[
        list[str] | None, typer.Argument(help="python SCRIPT, and the script's own arguments.", show_default=False)
    ] = None,
    num_proc: Annotated[int | None, typer.Option("-np", "--num-proc", help="Processes that train.")] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", help="This host, with its slots.", metavar="HOST:SLOTS")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("-hostfile", "--hostfile", help="The same in a file: HOST slots=SLOTS.")
    ] = None,
    check_build: Annotated[
        bool, typer.Option("-cb", "--check-build", help="Show what operations can use, and exit.")
    ] = False,
    start_timeout: Annotated[float, typer.Option(help="Seconds that workers may take to meet.")] = 300.0,
    fusion_threshold_mb: Annotated[
        int | None, typer.Option(help="The most that small all-reduces are put together to.", min=0)
    ] = None,
    cycle_time_ms: Annotated[
        float | None, typer.Option(help="How long an operation may lie that nobody waits for.", min=0)
    ] = None,
    cache_capacity: Annotated[
        int | None, typer.Option(help="Operations that ranks call by a number once they have agreed on them.", min=0)
    ] = None,
    hierarchical_allreduce: Annotated[
        bool, typer.Option("--hierarchical-allreduce", help="As it is: within hosts first, then between them.")
    ] = False,
    gloo: Annotated[bool, typer.Option("--gloo", help="As it is: workers meet without MPI.")] = False,
    timeline_filename: Annotated[
        Path | None, typer.Option(help="Write when operations were asked for and done.")
    ] = None,
    timeline_mark_cycles: Annotated[bool, typer.Option("--timeline-mark-cycles", help="Mark rounds there.")] = False,
    no_stall_check: Annotated[
        bool, typer.Option("--no-stall-check", help="Do not warn of operations that wait.")
    ] = False,
    stall_check_warning_time_seconds: Annotated[
        float | None, typer.Option(help="After so long a warning names who is missing.", min=0)
    ] = None,
    alias: Annotated[bool, typer.Option(help="Stand in for Horovod where it is not installed.")] = True,
    host_discovery_script: _Text = None,
    min_num_proc: Annotated[str | None, typer.Option("--min-np", "--min-num-proc", hidden=True)] = None,
    max_num_proc: Annotated[str | None, typer.Option("--max-np", "--max-num-proc", hidden=True)] = None,
    slots_per_host: _Text = None,
    elastic_timeout: _Text = None,
    reset_limit: _Text = None,
    blacklist_cooldown_range: Annotated[tuple[int, int] | None, typer.Option(hidden=True)] = None,
    config_file: _Text = None,
    mpi: _Flag = False,
    autotune: _Flag = False,
    stall_check_shutdown_time_seconds: _Text = None,
) -> None:
    """Run a script of Horovod's in so many processes, on this machine or the Ray cluster of RAY_ADDRESS.

    Example: paceline horovodrun -np 4 python legacy.py --lr 0.1
    """
    given = locals()
    for option, remedy in _REFUSED.items():
        if given[option.removeprefix("--").replace("-", "_")] not in (None, False):
            raise UsageError(f"{option} cannot be had: {remedy}")
    if check_build:
        typer.echo(_build())
        return
    if num_proc is None:
        raise UsageError("say with -np how many processes there are to be")
    if hosts is not None and hostfile is not None:
        raise UsageError("give -H or --hostfile, not both")
    if hosts is not None or hostfile is not None:
        _require_slots(hosts.split(",") if hosts is not None else _lines(hostfile), num_proc)
    script, arguments = _script_of(command or [])
    settings = {
        "HOROVOD_FUSION_THRESHOLD": None if fusion_threshold_mb is None else fusion_threshold_mb * _MEBIBYTE,
        "HOROVOD_CYCLE_TIME": cycle_time_ms,
        "HOROVOD_CACHE_CAPACITY": cache_capacity,
        "HOROVOD_TIMELINE": None if timeline_filename is None else timeline_filename.resolve(),
        "HOROVOD_TIMELINE_MARK_CYCLES": int(timeline_mark_cycles) or None,
        "HOROVOD_STALL_CHECK_DISABLE": int(no_stall_check) or None,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": stall_check_warning_time_seconds,
    }
    os.environ.update({name: str(value) for name, value in settings.items() if value is not None})
    from paceline.cli.run import run

    run(script, strategy="horovod", workers=num_proc, deadline=start_timeout, alias=alias, arguments=arguments)


def _script_of(command: list[str]) -> tuple[Path, list[str]]:
    """The script and its arguments. Raises UsageError for anything but a Python script."""
    first, *rest = command or [""]
    if Path(first).name.startswith("python") and rest:
        first, *rest = rest[1:] if rest[0] == "-u" else rest
    if not first.endswith(".py"):
        raise UsageError(f"give python SCRIPT and its arguments after the options, not {' '.join(command)!r}")
    return Path(first), rest


def _lines(hostfile: Path | None) -> list[str]:
    """A hostfile's hosts as -H takes them."""
    assert hostfile is not None
    try:
        lines = [line.split("#")[0].strip() for line in hostfile.read_text().splitlines()]
    except OSError as error:
        raise UsageError(f"cannot read the hostfile {hostfile}: {error.strerror}") from None
    return [":".join(line.replace("slots=", " ").split()) for line in lines if line]


def _require_slots(hosts: Iterable[str], num_proc: int) -> None:
    """Raise UsageError where hosts are not this one alone, or have too few slots."""
    own = {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}
    slots = 0
    for text in hosts:
        host, _, count = text.strip().partition(":")
        if host not in own:
            raise UsageError(
                f"-H and --hostfile name {host}, and hosts are reached through Ray alone: start Ray on all of them "
                "(docs/cluster.md), set RAY_ADDRESS, and leave them out"
            )
        if not count.isdigit() and count:
            raise UsageError(f"{text!r} is not of the form host:slots")
        slots += int(count or 1)
    if num_proc > slots:
        raise UsageError(f"-np {num_proc} is more than the {slots} slots of the hosts")


def _build() -> str:
    """What can be used, in the form in which scripts look for it."""
    from importlib import metadata

    import paceline.horovod.torch as hvd

    frameworks = {"TensorFlow": False, "PyTorch": True, "MXNet": False}
    controllers = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built()}
    operations = {"NCCL": bool(hvd.nccl_built()), "DDL": hvd.ddl_built(), "CCL": hvd.ccl_built(), **controllers}
    lines = [f"Horovod's interface in Paceline {metadata.version('paceline')}:"]
    for title, parts in (
        ("Frameworks", frameworks), ("Controllers", controllers), ("Tensor Operations", operations)
    ):  # fmt: skip
        lines += ["", f"Available {title}:", *(f"    [{'X' if has else ' '}] {name}" for name, has in parts.items())]
    return "\n".join(lines)
