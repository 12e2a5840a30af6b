"""Tickets of real clients: whose they are, where they lead, and what becomes of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.tickets import Ticket, Tickets
from paceline.errors import UsageError


def test_tickets_are_for_their_owner_and_say_where_the_server_is(tmp_path: Path) -> None:
    tickets = Tickets.made(tmp_path / "keys", num_clients=2, address="[::1]:77")
    ticket = Ticket.read(tickets.path_of(1))
    assert (ticket.client, ticket.address, tickets.client_of(ticket.public.encode())) == (1, "[::1]:77", 1)
    files = list((tmp_path / "keys").iterdir())
    assert len(files) == 5  # with a lock
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    again = Tickets.made(tmp_path / "keys", num_clients=3, address=None)
    assert Ticket.read(again.path_of(1)) == ticket
    assert sorted(again.listed()) == ["0", "1", "2"]
    with pytest.raises(UsageError, match="the server is at"):
        Tickets.made(tmp_path / "keys", num_clients=3, address="elsewhere")


def test_a_revoked_ticket_is_gone_at_once_for_a_server_that_runs(tmp_path: Path) -> None:
    running = Tickets.made(tmp_path, num_clients=2, address="here")
    key = Ticket.read(running.path_of(1)).public.encode()
    assert running.client_of(key) == 1
    Tickets(tmp_path).revoke(1)
    assert running.client_of(key) is None
    assert not running.path_of(1).exists()
    with pytest.raises(UsageError, match="no client 1"):
        Tickets(tmp_path).revoke(1)
    assert running.client_of(b"\xff" * 40) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": 1}'])
def test_what_is_no_ticket_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "it.ticket"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"it\.ticket"):
        Ticket.read(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"run": "/../../../elsewhere"},
        {"run": 5},
        {"run": "0" * 16 + "\n"},
        {"client": -1},
        {"client": "1"},
        {"client": True},
        {"address": 7},
        {"address": "::1"},
        {"public": "short"},
        {"secret": None},
    ],
)
def test_a_ticket_of_another_form_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    path = Tickets.made(tmp_path, num_clients=1, address="here").path_of(0)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(UsageError):
        Ticket.read(path)


def test_tickets_that_are_made_and_revoked_at_the_same_time_are_all_listed(tmp_path: Path) -> None:
    Tickets.made(tmp_path, num_clients=8, address="here")

    def change(number: int) -> None:
        Tickets(tmp_path).revoke(number)
        Tickets(tmp_path).add(100 + number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(8)))
    found = Tickets(tmp_path).listed()
    assert all(found[str(number)] is None for number in range(8))
    assert all(
        found[str(100 + number)] == Ticket.read(tmp_path / f"client-{100 + number}.ticket").public
        for number in range(8)
    )
