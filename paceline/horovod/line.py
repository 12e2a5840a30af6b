"""The line between the launcher and one of its workers: plain messages, past the script's own input and output.

The launcher writes lines of JSON into the worker's input; its end tells that the launcher is gone, or wants the worker
to go. The worker writes into its output, in lines that begin with a mark that no script knows.
"""

import contextlib
import json
import os
import queue
import re
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO, final

LEAVE_WITHIN_S = 5.0
_PIECE = 3000  # of a message, so that the kernel writes it whole, whoever else writes into the pipe
_START = "\x02"
_LINE = re.compile(r"(\d+)([+.])(.*)\n")  # after the mark: whose piece it is, whether it is the last, and the piece


class Listener(Protocol):
    def on_hosts_updated(self, timestamp: float, update_res: int) -> None: ...


class Line(ABC):
    """A worker's end, as elastic jobs need it."""

    def __init__(self) -> None:
        self.epoch = 0
        """The epoch of the membership that the worker is in."""
        self.has_newcomers = False
        """Whether some of that membership were not in the one before."""
        self.before_end: Callable[[], None] = lambda: None
        """Is called before the process is ended because the launcher wants it to."""
        self._update: tuple[int, float, int] | None = None  # epoch, time, what: the last that was heard
        self._listeners: list[Listener] = []

    def ask(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for a place in the next membership. Raises SystemExit if there is none any more.

        Args:
            mine: what the others are to know of this worker.
        """
        place = self._ask(mine)
        self.epoch, self.has_newcomers = place["epoch"], place["has_newcomers"]
        return place

    def listen(self, listener: Listener) -> None:
        """Tell it of changes of hosts from here on, and of one of this membership that has come already."""
        if listener not in self._listeners:
            self._listeners.append(listener)
        self.remind(listener)

    def forget(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def remind(self, listener: Listener) -> None:
        """Tell it anew of what it may have forgotten."""
        if self._update is not None and self._update[0] == self.epoch:
            listener.on_hosts_updated(*self._update[1:])

    def heard(self, *, epoch: int, timestamp: float, update: int) -> None:
        """Hosts have changed since the membership began."""
        self._update = (epoch, timestamp, update)
        if epoch == self.epoch:
            for listener in [*self._listeners]:
                listener.on_hosts_updated(timestamp, update)

    @abstractmethod
    def say(self, kind: str, **values: Any) -> None:
        """Send the launcher a message, from any thread."""

    @abstractmethod
    def _ask(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """As `ask`."""


@final
class PipeLine(Line):
    """Over the worker's input and output.

    Args:
        told: the worker's input, which the script does not have.
        output: the worker's output, as a file descriptor of the line's own.
        mark: what lines for the launcher begin with.
    """

    def __init__(self, told: TextIO, output: int, mark: str) -> None:
        super().__init__()
        self._told, self._output, self._mark = told, output, mark
        self._places: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._is_waiting = False
        self._saying = threading.Lock()
        threading.Thread(target=self._serve, name="paceline launcher's line", daemon=True).start()

    def say(self, kind: str, **values: Any) -> None:
        with self._saying:
            for line in framed(self._mark, {"kind": kind, **values}):
                os.write(self._output, line.encode())

    def _ask(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        self._is_waiting = True
        self.say("ask", mine=dict(mine))
        place = self._places.get()
        self._is_waiting = False
        if place is None:
            raise SystemExit(0)
        return place

    def _serve(self) -> None:
        for line in self._told:
            message = json.loads(line)
            if message.pop("kind") == "enter":
                self._places.put(message)
            else:
                self.heard(**message)
        if self._is_waiting:  # the script ends as by `sys.exit()`
            self._places.put(None)
        else:
            with contextlib.suppress(OSError):  # the launcher is gone
                self.before_end()
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(LEAVE_WITHIN_S)  # a script may catch the signal, but not stay
        os._exit(1)


def framed(mark: str, message: Mapping[str, Any]) -> list[str]:
    """A message as lines, each short enough to be written whole, which say of which process they are."""
    text, start = json.dumps(message), f"{_START}{mark}{os.getpid()}"
    pieces = [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
    return [f"{start}{'.' if number == len(pieces) else '+'}{piece}\n" for number, piece in enumerate(pieces, 1)]


@final
class Unframer:
    """Tells messages from the script's own output.

    Args:
        hear: is called with each message.
    """

    def __init__(self, mark: str, hear: Callable[[dict[str, Any]], None]) -> None:
        self._start, self._hear = _START + mark, hear
        self._pieces: dict[str, list[str]] = {}  # of each process that shares the output
        self._begun = ""

    def output_of(self, line: str) -> str:
        """What of a line is the script's. What it had begun before a message is given with its rest.

        Raises:
            Exception: the message cannot be read, or what `hear` raises; the next line can be given all the same.
        """
        own, start, said = line.partition(self._start)
        if not start:
            own, self._begun = self._begun + own, ""
            return own
        self._begun += own
        if (found := _LINE.fullmatch(said)) is None:
            raise ValueError(f"a message is torn: {said!r}")
        process, ending, piece = found.groups()
        pieces = self._pieces.setdefault(process, [])
        pieces.append(piece)
        if ending == ".":
            del self._pieces[process]
            self._hear(json.loads("".join(pieces)))
        return ""

    def rest(self) -> str:
        """What the script had begun and not ended."""
        own, self._begun = self._begun, ""
        return own


_line: Line | None = None


def current() -> Line | None:
    """This process's line to a launcher of elastic jobs, if there is one."""
    return _line


def connect(line: Line | None) -> None:
    """Have elastic jobs of this process use the line."""
    global _line
    _line = line
