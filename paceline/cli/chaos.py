"""`paceline chaos`: runs of one script whose workers, servers or launcher die where chance has it."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from paceline.cli import common_options
from paceline.elastic.spec import GlobalBatch
from paceline.engines.scripting import read_script
from paceline.errors import RunFailed, UsageError


def chaos(
    script: common_options.Script,
    strategy: Annotated[
        str,
        typer.Option(help="all-reduce, local updates (diloco:every=10), fed-avg, gossip, ad-psgd, or servers."),
    ] = "all-reduce",
    workers: Annotated[int, typer.Option(help="Processes that train.")] = 3,
    option: Annotated[
        list[str] | None, typer.Option(help="A further option of the strategy; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    kills: Annotated[
        int | None,
        typer.Option(help="Processes that are to die, in as many runs as it takes.", show_default="10"),
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Under servers with replicas: workers die, too, as with run --elastic.")
    ] = False,
    at_least: Annotated[
        int | None, typer.Option(help="Workers that are left alive in each run.", show_default="1")
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            help="Of elastic runs, as run --elastic has it.",
            metavar="keep|grow",
            show_default="keep under all-reduce, otherwise grow",
        ),
    ] = None,
    start_deadline: common_options.StartDeadline = 120.0,
    seed: Annotated[int, typer.Option(help="Of the script, and of who is struck where, how and when.")] = 0,
    max_steps: Annotated[
        int | None, typer.Option(help="End each run after so many iterations; under all-reduce, clients and ps-bsp.")
    ] = None,
    schedule: Annotated[
        Path | None, typer.Option(help="Strike as this file has it, which an earlier call wrote.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for the runs, new or empty.", show_default="a new one under runs/")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster; where its hosts are network namespaces, these are struck.")
    ] = None,
    arguments: common_options.Arguments = None,
) -> None:
    """Strike processes of runs of SCRIPT at places of the protocol, and judge whether nothing is lost.

    One run is left alone. In the others processes end (SIGKILL, a segmentation fault), stop (SIGSTOP, for good or for a
    second), hold their interpreter, run out of memory, or lose their connections: workers, which the others outlive as
    in elastic runs, servers that have copies (replicas=R), and with --elastic both in one run, while other servers
    join; or the launcher of a detached run dies, or finds its disk full. With --address, links and Ray nodes of hosts
    that are network namespaces of this machine fail.

    A run is right if whoever was struck and nobody else is lost, every sample or gradient counts as often as in the
    undisturbed run, the final model is as near to that one's as the strategy promises, and no process or descriptor is
    left. Each run's line tells how far its model is, and how far it may be.

    Example: paceline chaos train.py --strategy all-reduce --kills 20 --seed 7
    """
    if kills is not None and schedule is not None:
        raise UsageError("--kills has no effect with --schedule, which says who dies; leave one of them out")
    if kills is not None and kills < 1:
        raise UsageError(f"--kills must be at least 1, not {kills}")
    program = read_script(script, arguments or ())
    from paceline.pieces import parse_options
    from paceline.running.chaos import Campaign, Schedule
    from paceline.running.chaos.campaign import SCHEDULE_FILE
    from paceline.strategies import build

    given = None if schedule is None else Schedule.read(schedule)
    folder = out or Path("runs", f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-chaos")  # noqa: TID251 - a name
    campaign = Campaign(
        script=program,
        strategy=build(strategy, parse_options(option or [], where="--option")),
        workers=workers,
        elastic=elastic,
        at_least=at_least,
        global_batch=cast(GlobalBatch | None, global_batch),
        start_deadline_s=start_deadline,
        seed=seed,
        max_steps=max_steps,
        address=address,
        out=folder,
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    num_runs = num_killed = num_wrong = 0
    for struck in campaign.runs(kills=kills or 10, given=given):
        num_runs, num_wrong = num_runs + 1, num_wrong + bool(struck.wrong)
        num_killed += struck.num_died
        told = "; ".join(map(str, struck.met)) or "ended before it was struck"
        console.print(f"{struck.directory}: {told}: model {struck.distance:.1e} apart ({_bound(struck.bound)})")
        for each in struck.wrong:
            console.print(f"  wrong: {each}")
    deaths, runs = _counted(num_killed, "death"), _counted(num_runs, "run")
    console.print(f"{deaths} in {runs}, {num_wrong} wrong; again: --schedule {folder / SCHEDULE_FILE}")
    if num_wrong:
        raise RunFailed(f"{num_wrong} of {runs} lost something; their records are in {folder}")


def _bound(largest: float) -> str:
    return f"of {largest:g} at most" if largest < math.inf else "the strategy sets no bound"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
