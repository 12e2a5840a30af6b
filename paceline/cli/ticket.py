"""`paceline ticket`: make clients' tickets, or revoke one."""

from pathlib import Path
from typing import Annotated

import typer


def ticket(
    directory: Annotated[Path, typer.Argument(help="The --tickets of `paceline serve`.", show_default=False)],
    clients: Annotated[
        int | None, typer.Option(help="Make as many as there have to be for so many clients.", show_default="one more")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Where clients reach the server.", metavar="HOST[:PORT]", show_default="this machine's name, port 9610"
        ),
    ] = None,
    revoke: Annotated[
        int | None, typer.Option(help="Number of a client that is to be refused from now on.", metavar="CLIENT")
    ] = None,
) -> None:
    """Make tickets for clients of a federated run, or revoke one; a server that runs minds it at once.

    Example: paceline ticket tickets --clients 8 --address server.example.org
    """
    from paceline.comm.tickets import Tickets
    from paceline.errors import UsageError

    if revoke is not None:
        if clients is not None or address is not None:
            raise UsageError("--revoke makes no tickets; leave --clients and --address out")
        Tickets(directory).revoke(revoke)
        typer.echo(f"client {revoke} is refused from now on")
        return
    before = set(directory.glob("*.ticket"))
    known = Tickets.made(directory, num_clients=0, address=address)
    Tickets.made(directory, num_clients=clients if clients is not None else len(known.listed()) + 1, address=None)
    for path in sorted(set(directory.glob("*.ticket")) - before):
        typer.echo(str(path))
