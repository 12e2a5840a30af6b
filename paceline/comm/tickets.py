"""Tickets: what a client needs to take part in a served run, and what the server knows of them."""

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import filelock
import zmq

from paceline import durable
from paceline.comm.wire import Keys
from paceline.errors import UsageError

DEFAULT_PORT = 9610
_OWN, _LIST, _LOCK = "server.json", "clients.json", ".lock"


@final
@dataclass(frozen=True)
class Ticket:
    """One client's: where the server is, whose it is, and a key pair that nobody else has."""

    run: str
    """Tells this server's clients from another's."""
    client: int
    address: str
    """Host and port, as clients reach the server."""
    server_public: str
    public: str
    secret: str = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> "Ticket":
        """Raises UsageError if the file is no ticket."""
        try:
            ticket = cls(**_read(path))
            ticket._require_form()
        except TypeError as error:
            raise UsageError(f"{path} is no ticket: {error}") from None
        split_address(ticket.address)
        return ticket

    def _require_form(self) -> None:
        """Raises TypeError. What a ticket says names a directory, too, so that nothing is left open."""
        if type(self.client) is not int or self.client < 0:
            raise TypeError("client is no number")
        for name in ("run", "address", "server_public", "public", "secret"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is no text")
        if not re.fullmatch("[0-9a-f]{16}", self.run):
            raise TypeError("run is not 16 hexadecimal digits")
        for name in ("server_public", "public", "secret"):
            if not re.fullmatch("[!-~]{40}", getattr(self, name)):
                raise TypeError(f"{name} is no key")

    @property
    def keys(self) -> Keys:
        """As a caller needs them, who does not have the server's secret."""
        return Keys(self.server_public.encode(), b"", self.public.encode(), self.secret.encode())


@final
class Tickets:
    """A directory of the server's: its own key pair, a file a client to hand over, and which keys are admitted. It is
    read anew when another process has changed it.

    A ticket may be deleted here once it was handed over; the list of keys holds nothing secret of a client's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen: tuple[int, int] | None = None
        self._clients: dict[str, int] = {}

    @classmethod
    def made(cls, directory: Path, *, num_clients: int, address: str | None) -> "Tickets":
        """The directory's, which has at least so many clients from here on.

        Args:
            address: of the server as clients reach it, `HOST` or `HOST:PORT`; none: what the directory says, or this
                machine's name.

        Raises:
            UsageError: tickets of another address are there already.
        """
        tickets = cls(directory)
        if not (directory / _OWN).exists():
            tickets._begin(address)
        if address is not None and split_address(address) != split_address(tickets.address):
            raise UsageError(
                f"the tickets in {directory} say that the server is at {tickets.address}, not at {address}; give "
                "another --tickets directory, or have clients join with --address"
            )
        while len(known := tickets.listed()) < num_clients:
            tickets.add(max((int(number) for number in known), default=-1) + 1)
        return tickets

    def _begin(self, address: str | None) -> None:
        """Begin with a key pair for the server and with nobody's tickets, unless another process has just done so."""
        where = ":".join(map(str, split_address(address or socket.getfqdn())))
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._alone():
            if (self.directory / _OWN).exists():
                return
            public, secret = (key.decode() for key in zmq.curve_keypair())
            _write(self.directory / _LIST, {})
            _write(
                self.directory / _OWN,
                {"run": secrets.token_hex(8), "address": where, "server_public": public, "server_secret": secret},
            )

    @property
    def address(self) -> str:
        return str(self._own()["address"])

    @property
    def run(self) -> str:
        return str(self._own()["run"])

    def server_keys(self) -> tuple[bytes, bytes]:
        """Public and secret."""
        own = self._own()
        return str(own["server_public"]).encode(), str(own["server_secret"]).encode()

    def listed(self) -> dict[str, Any]:
        """Every client's public key, or none where it was revoked, by number."""
        return _read(self.directory / _LIST)

    def add(self, client: int) -> Path:
        """Make one more ticket, unless the client has one already."""
        own = self._own()
        public, secret = (key.decode() for key in zmq.curve_keypair())
        ticket = Ticket(own["run"], client, own["address"], own["server_public"], public, secret)
        path = self.path_of(client)
        with self._alone():
            known = self.listed()
            if str(client) not in known:
                _write(path, asdict(ticket))
                _write(self.directory / _LIST, {**known, str(client): public})
        return path

    def path_of(self, client: int) -> Path:
        return self.directory / f"client-{client}.ticket"

    def revoke(self, client: int) -> None:
        """Raises UsageError if there is no such client."""
        if not self.directory.is_dir():
            raise UsageError(f"there is no directory {self.directory} with tickets")
        with self._alone():
            known = self.listed()
            if known.get(str(client)) is None:
                raise UsageError(f"{self.directory} has no client {client} that is not revoked already")
            _write(self.directory / _LIST, {**known, str(client): None})
        self.path_of(client).unlink(missing_ok=True)

    def client_of(self, key: bytes) -> int | None:
        """The client whose public key it is now; none: nobody's."""
        try:
            found = os.stat(self.directory / _LIST)
        except OSError:
            return None
        if self._seen != (seen := (found.st_mtime_ns, found.st_ino)):
            self._clients = {str(public): int(number) for number, public in self.listed().items() if public}
            self._seen = seen
        return self._clients.get(key.decode(errors="replace"))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Between what is read of the list and what is written of it, nobody else writes it."""
        with filelock.FileLock(self.directory / _LOCK, mode=0o600):
            yield

    def _own(self) -> dict[str, Any]:
        return _read(self.directory / _OWN)


def split_address(address: str, *, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port; without a port, the default one. Raises UsageError for another form."""
    host, colon, port = address.rpartition(":") if not address.endswith("]") else (address, "", "")
    if not colon:
        host, port = address, str(default_port)
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or is_bare or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"{address!r} is no address of the form HOST or HOST:PORT; IPv6 goes in [brackets]")
    return host, int(port)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no ticket")
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that nobody but its owner may read."""
    with durable.whole(path) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
