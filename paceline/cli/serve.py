"""`paceline serve`: be the server of a federated run whose clients are elsewhere."""

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from paceline.cli import common_options, exit_codes
from paceline.config import AfterTarget, DeviceChoice, RunConfig, Target
from paceline.interval import Interval


def serve(
    script: common_options.Script,
    tickets: Annotated[
        Path, typer.Option(help="Keys and a ticket a client: made where they are not there.", metavar="DIR")
    ] = Path("tickets"),
    strategy: Annotated[
        str, typer.Option(help="fed-avg or another fed-* name, with options as in fed-adam:epochs=2.")
    ] = "fed-avg",
    clients: Annotated[
        int | None, typer.Option(help="How many tickets there are to be; the same as --option clients=N.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A further option of the strategy; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Where clients reach this machine, for their tickets.",
            metavar="HOST[:PORT]",
            show_default="its name, port 9610",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Where to listen.", metavar="HOST[:PORT]", show_default="every address, the port of the tickets"
        ),
    ] = None,
    min_clients: Annotated[int, typer.Option(help="So many must be there before a round begins.")] = 2,
    round_deadline: Annotated[
        float, typer.Option(help="Seconds that a round lasts at most; later updates are dropped.")
    ] = 600.0,
    outweigh: Annotated[
        float, typer.Option(help="A client counts at most so many times as much as the median one of its round.")
    ] = 10.0,
    over: Annotated[
        float, typer.Option(help="Draw so many times as many clients as are needed; a round ends with the first ones.")
    ] = 1.0,
    max_steps: Annotated[int | None, typer.Option(help="End after so many rounds.")] = None,
    max_time: Annotated[float | None, typer.Option(help="End after so many seconds.")] = None,
    eval_every: common_options.EvalEvery = None,
    target: Annotated[
        str | None, typer.Option(help="What to reach; the run ends when evaluations hold it.", metavar="METRIC=VALUE")
    ] = None,
    hold: common_options.Hold = None,
    after_target: common_options.AfterTarget = "stop",
    seed: Annotated[
        int | None, typer.Option(help="Of what the server draws.", show_default="drawn, so that nobody knows its noise")
    ] = None,
    device: common_options.Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Result directory; a run that lies there goes on from its last round.", show_default="run in --tickets"
        ),
    ] = None,
    arguments: common_options.Arguments = None,
) -> None:
    """Be the server of a federated run: clients join it with tickets, on machines and with data of their own.

    Example: paceline serve train.py --strategy fed-avg --clients 8 --address server.example.org --max-steps 50
    """
    config = RunConfig(
        max_steps=max_steps,
        max_time_s=max_time,
        eval_every=Interval.parse(eval_every) if eval_every is not None else None,
        target=Target.parse(target) if target is not None else None,
        hold=hold,
        after_target=cast(AfterTarget, after_target),
        device=cast(DeviceChoice, device),
    )
    from paceline.cli import tables
    from paceline.errors import UsageError
    from paceline.pieces import parse_options
    from paceline.running import serving
    from paceline.strategies import build

    options = parse_options(option or [], where="--option")
    if clients is not None and options.setdefault("clients", str(clients)) != str(clients):
        raise UsageError(f"--clients {clients} and --option clients={options['clients']} differ; give one of them")
    plan = build(strategy, options)
    console = Console(stderr=True, soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    try:
        result = serving.serve(
            script,
            strategy=plan,
            tickets=tickets,
            listen=listen,
            address=address,
            arguments=arguments or (),
            rounds=serving.Rounds(min_clients=min_clients, deadline_s=round_deadline, outweigh=outweigh, over=over),
            config=config,
            seed=seed,
            out=out,
            say=say,
        )
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on from the last round, which is in {out or tickets / 'run'}")
        raise typer.Exit(exit_codes.INTERRUPTED) from None
    Console().print(tables.summary(result, [], hold=hold))
