"""Running a script as the server of a served run, or as one of its clients: in this process, in a world of one."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import final

from paceline.checkpoint import Checkpoint
from paceline.comm.alone import AloneCollective
from paceline.comm.client_sockets import ClientsSocket, ServerSocket
from paceline.comm.tickets import Ticket, Tickets
from paceline.config import RunConfig
from paceline.engines.directory_reporter import DirectoryReporter
from paceline.engines.scripting import Script, outcome_of, run_program
from paceline.engines.served.clients import ServedClients
from paceline.engines.served.server import ServerAfar
from paceline.engines.standing import Progress
from paceline.engines.world import World, device_of, enter
from paceline.errors import PacelineError, RunFailed
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.records import EvaluationRecord, Record, summarise
from paceline.seeding import derive
from paceline.served.rules import Rules
from paceline.strategies import name_of, settings_of
from paceline.strategies.base import Context, Strategy
from paceline.strategies.elsewhere import ClientsElsewhere, ServerElsewhere

Say = Callable[[str], None]
_OF_SERVER = ("partition", "aggregate", "outer", "reject")
"""Options that are no business of clients."""


@final
class ServedRun:
    """A server's run.

    Args:
        listen: host and port.
        say: prints a line of the server's log.

    Raises:
        UsageError: the port is taken, or this machine lacks the device that is asked for.
    """

    def __init__(
        self,
        script: Script,
        strategy: Strategy,
        config: RunConfig,
        *,
        tickets: Tickets,
        listen: tuple[str, int],
        rules: Rules,
        directory: Path,
        checkpoint: Checkpoint | None,
        say: Say,
    ) -> None:
        self._script, self._strategy, self._config, self._checkpoint = script, strategy, config, checkpoint
        self._reporter = DirectoryReporter(directory, config, partial(_say_evaluations, say))
        settings = settings_of(strategy).items()
        options = {key: value for key, value in settings if key.partition(".")[0] not in _OF_SERVER}
        host, port = listen
        self._socket = ClientsSocket(tickets.server_keys(), host=host, port=port, client_of=tickets.client_of)
        self._clients = ServedClients(
            self._socket,
            client_of=tickets.client_of,
            welcome={"strategy": name_of(strategy), "options": options},
            rules=rules,
            masks=getattr(strategy, "secure", None),
            goes_on=checkpoint is not None,
            reporter=self._reporter,
            say=say,
        )

    def run(self) -> None:
        """Return when the run's budget is used up, or its target reached, and clients have fetched the model.

        Raises:
            RunFailed: the script failed.
            KeyboardInterrupt: the user interrupted the run, which has saved its last round; clients wait for it.
        """
        with closing(self._socket), closing(self._reporter), _first_interrupt(self._reporter.request_stop):
            world = _world(self._strategy, self._config, self._reporter, self._checkpoint, clients=self._clients)
            with _entered(world):
                _run(self._script, world)
                if not self._reporter.stop_requested():
                    self._clients.farewell()
        if self._reporter.stop_requested():
            raise KeyboardInterrupt


@final
class JoinedRun:
    """A client's run. It has begun when the server has said which strategy it is.

    Args:
        address: of the server, if not the ticket's.
        deadline_s: how long the server may say nothing.
        say: prints a line.
    """

    def __init__(self, ticket: Ticket, *, address: str | None, deadline_s: float, say: Say) -> None:
        self._socket = ServerSocket(ticket, address=address)
        where = address or ticket.address
        self._server = ServerAfar(self._socket, where=where, deadline_s=deadline_s, say=say)
        self._say = say

    @property
    def tag(self) -> str:
        """What tells the server's run from another one, once it has welcomed this client."""
        return f"{derive(self._server.coding_seed, 'tag') % 2**32:08x}"

    def welcome(self) -> tuple[str, dict[str, str]]:
        """The strategy's name and options. Raises UsageError where the ticket is refused."""
        welcome = self._server.join()
        return str(welcome["strategy"]), {str(key): str(value) for key, value in welcome["options"].items()}

    def run(
        self, script: Script, strategy: Strategy, config: RunConfig, directory: Path, checkpoint: Checkpoint | None
    ) -> None:
        """Return when the run is over, or the script ends. Raises RunFailed if the script fails."""
        reporter = DirectoryReporter(directory, config, partial(_say_evaluations, self._say))
        self._server.masks = getattr(strategy, "secure", None)
        with closing(reporter):
            world = _world(strategy, config, reporter, checkpoint, server=self._server)
            with _entered(world):
                try:
                    _run(script, world)
                finally:
                    self._server.leave()

    def close(self) -> None:
        self._socket.close()


def _world(
    strategy: Strategy,
    config: RunConfig,
    reporter: DirectoryReporter,
    checkpoint: Checkpoint | None,
    *,
    clients: ClientsElsewhere | None = None,
    server: ServerElsewhere | None = None,
) -> World:
    keep_freed_memory()
    context = Context(
        rank=0,
        membership=Membership.first(1),
        local_rank=0,
        local_size=1,
        device=device_of(config),
        collective=AloneCollective(),
        clients=clients,
        server=server,
    )
    return World(context, strategy, config, reporter, checkpoint)


@contextmanager
def _entered(world: World) -> Iterator[None]:
    enter(world)
    try:
        yield
    finally:
        world.release()
        enter(None)


def _run(script: Script, world: World) -> None:
    """Raises RunFailed with the script's own frames, where it fails."""
    try:
        run_program(script)
        for finish in world.at_end:
            finish()
    except PacelineError:
        raise
    except Exception as error:
        outcome = outcome_of(error, num_steps=world.progress())
        raise RunFailed(f"the script failed: {outcome.error}\n{outcome.traceback}".rstrip()) from None


@contextmanager
def _first_interrupt(note: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM has the run save and end; the second one ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(*_: object) -> None:
        note()
        for number in handlers:
            signal.signal(number, signal.default_int_handler)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _say_evaluations(say: Say, records: Sequence[Record], progress: Progress) -> None:
    for record in records:
        if isinstance(record, EvaluationRecord):
            say(f"after round {record.iteration}: {summarise(record.metrics)}")
