"""`paceline horovodrun`: the command line of Horovod's launcher, for `paceline run --strategy horovod`."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.engines.scripting import Script
    from paceline.horovod.elastic_jobs.options import Elastic
    from paceline.horovod.processes import Command

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""What follows the command is its own."""

_MEBIBYTE = 2**20
_REFUSED = {
    "--mpi": "workers meet without MPI; leave it out",
    "--autotune": "operations are put together by --fusion-threshold-mb, which nothing tunes; leave it out",
}

_START_WITHIN_S = 300.0
_VARIABLES = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}
_SWITCHES = {"timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES", "no_stall_check": "HOROVOD_STALL_CHECK_DISABLE"}

_Flag = Annotated[bool, typer.Option(hidden=True)]


def horovodrun(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="What each process runs, as python SCRIPT or bash -c TEXT.", show_default=False),
    ] = None,
    num_proc: Annotated[int | None, typer.Option("-np", "--num-proc", help="Processes that train.")] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H", "--hosts", help="Hosts with their slots; others than this one over ssh.", metavar="HOST:SLOTS,..."
        ),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("-hostfile", "--hostfile", help="The same in a file: HOST slots=SLOTS.")
    ] = None,
    check_build: Annotated[
        bool, typer.Option("-cb", "--check-build", help="Show what operations can use, and exit.")
    ] = False,
    ssh_port: Annotated[int | None, typer.Option("-p", "--ssh-port", help="Of ssh on all hosts.")] = None,
    ssh_identity_file: Annotated[
        Path | None, typer.Option("-i", "--ssh-identity-file", help="The private key for ssh.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="Settings in YAML; what the command line says goes before them.")
    ] = None,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds that workers may take to meet.", show_default="300")
    ] = None,
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
    stall_check_shutdown_time_seconds: Annotated[
        float | None, typer.Option(help="After so long operations fail, and the error names who is missing.", min=0)
    ] = None,
    alias: Annotated[bool, typer.Option(help="Stand in for Horovod where it is not installed.")] = True,
    host_discovery_script: Annotated[
        str | None, typer.Option(help="A program that prints the hosts that there are now; the job follows them.")
    ] = None,
    min_num_proc: Annotated[
        int | None, typer.Option("--min-np", "--min-num-proc", help="With fewer workers nobody goes on.", min=1)
    ] = None,
    max_num_proc: Annotated[
        int | None, typer.Option("--max-np", "--max-num-proc", help="The most workers of an elastic job.", min=1)
    ] = None,
    slots_per_host: Annotated[
        int | None, typer.Option("--slots-per-host", "--slots", help="Of hosts that are printed without.", min=1)
    ] = None,
    elastic_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that room for the fewest workers is waited for.", min=0, show_default="600"),
    ] = None,
    reset_limit: Annotated[
        int | None, typer.Option(help="How often an elastic job may change its workers.", min=0)
    ] = None,
    blacklist_cooldown_range: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Seconds, least and most, after which a host whose worker has failed gets another."),
    ] = None,
    mpi: _Flag = False,
    autotune: _Flag = False,
) -> None:
    """Run a script of Horovod's, or any command, in so many processes: here, on RAY_ADDRESS's cluster, or by ssh.

    Example: paceline horovodrun -np 4 python legacy.py --lr 0.1
    """
    given = {name: value for name, value in locals().items() if value is not None and value is not False}
    if config_file is not None:
        from paceline.horovod import config_file as files

        given = files.read(config_file) | given
    for option, remedy in _REFUSED.items():
        if given.get(option.removeprefix("--").replace("-", "_"), False) is not False:
            raise UsageError(f"{option} cannot be had: {remedy}")
    if check_build:
        typer.echo(_build())
        return
    if num_proc is None and min_num_proc is None:
        raise UsageError("say with -np how many processes there are to be")
    if hosts is not None and hostfile is not None:
        raise UsageError("give -H or --hostfile, not both")
    from paceline.horovod.elastic_jobs.options import Elastic
    from paceline.horovod.hosts import lines_of

    texts = hosts.split(",") if hosts is not None else [] if hostfile is None else lines_of(hostfile)
    if not command:
        raise UsageError("say after the options what to run, as in python train.py")
    _run(
        command,
        num_proc=num_proc or min_num_proc or 1,
        host_texts=texts,
        elastic=Elastic(**{field.name: given.get(field.name) for field in fields(Elastic)}),
        ssh=(ssh_port, None if ssh_identity_file is None else str(ssh_identity_file)),
        start_within_s=float(given.get("start_timeout", _START_WITHIN_S)),
        alias=alias,
        variables=_variables(given),
    )


def _run(
    command: list[str],
    *,
    num_proc: int,
    host_texts: list[str],
    elastic: "Elastic",
    ssh: tuple[int | None, str | None],
    start_within_s: float,
    alias: bool,
    variables: dict[str, str],
) -> None:
    """A Python script on this host or Ray's cluster as `paceline run` does it; in processes of the launcher's own
    where hosts are others, the job is elastic, or the command is another."""
    from paceline.horovod.hosts import fill, is_here, parse_hosts

    hosts = parse_hosts(host_texts, slots=elastic.slots_per_host or 1)
    if hosts and not elastic.is_asked_for:
        fill(hosts, num_proc)
    is_here_alone = not elastic.is_asked_for and all(is_here(host.name) for host in hosts)
    if is_here_alone and any(ssh):
        raise UsageError("--ssh-port and --ssh-identity-file have no effect without other hosts; leave them out")
    script = _script_of(command)
    if is_here_alone and script is not None:
        from paceline.cli.run import run

        os.environ.update(variables)
        path, arguments = script
        run(path, strategy="horovod", workers=num_proc, start_deadline=start_within_s, alias=alias, arguments=arguments)
        return
    from paceline.horovod.elastic_jobs.launch import ElasticLaunch
    from paceline.horovod.launch import Launch
    from paceline.horovod.processes import Job, Ssh
    from paceline.running.launched import LaunchedRun
    from paceline.strategies.horovod import Horovod

    settings = elastic.arguments(num_proc, host_texts) if elastic.is_asked_for else {}
    program = _program(command, script, alias=alias)
    name, arguments = script or (command[0], command[1:])
    recorded = LaunchedRun(str(name), arguments, strategy=Horovod(), num_workers=num_proc)
    job = Job(program, variables, start_within_s, elastic.is_asked_for, recorded.keep, recorded.note)
    with recorded:
        if elastic.is_asked_for:
            ElasticLaunch(job, ssh=Ssh(*ssh), **settings).run()
        else:
            hosts = hosts or parse_hosts([f"localhost:{num_proc}"])
            Launch(job, hosts, num_proc=num_proc, ssh=Ssh(*ssh)).run()
    if recorded.result is not None:
        from paceline.cli import tables

        Console(stderr=True).print(tables.summary(recorded.result))


def _program(command: list[str], script: tuple[Path, list[str]] | None, *, alias: bool) -> "Script | Command":
    """What the launcher's processes run. The user is told which packages Paceline stands in for."""
    from paceline.engines import aliases
    from paceline.engines.scripting import read_script
    from paceline.horovod.processes import Command

    program: Script | Command
    if script is not None:
        program = read_script(*script, may_alias=alias)
        stood_in = program.aliases
    else:
        program = Command(tuple(command), os.getcwd(), may_alias=alias)
        stood_in = aliases.missing("horovod") if alias else ()
    for name in stood_in:
        typer.echo(f"{name} is not installed: Paceline stands in for it (--no-alias: it does not)", err=True)
    return program


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    """What the workers' environment says of the launcher's options."""
    found = {name: str(given[option]) for option, name in _VARIABLES.items() if option in given}
    if "fusion_threshold_mb" in given:
        found["HOROVOD_FUSION_THRESHOLD"] = str(int(given["fusion_threshold_mb"] * _MEBIBYTE))
    if "timeline_filename" in given:
        found["HOROVOD_TIMELINE"] = str(given["timeline_filename"].resolve())
    for option, name in _SWITCHES.items():
        if given.get(option):
            found[name] = "1"
    return found


def _script_of(command: list[str]) -> tuple[Path, list[str]] | None:
    """The Python script and its arguments, if the command is one without options of Python's."""
    first, *rest = command
    if Path(first).name.startswith("python") and rest:
        first, *rest = rest[1:] if rest[0] == "-u" and len(rest) > 1 else rest
    return (Path(first), rest) if first.endswith(".py") else None


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
