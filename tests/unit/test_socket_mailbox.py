"""A mailbox between processes, as it is opened."""

from __future__ import annotations

import threading
from typing import Any, NoReturn, cast

import pytest

from paceline.comm.base import Collective
from paceline.comm.socket_mailbox import SocketMailbox
from paceline.comm.wire import Keys
from paceline.errors import PeerLost
from tests.threads import started_since


class Lonely:
    """A collective whose other worker has just died."""

    rank = 0

    def all_gather_object(self, mine: Any) -> NoReturn:
        raise PeerLost("rank 1 is lost")


def test_one_that_was_never_opened_leaves_nothing() -> None:
    before = set(threading.enumerate())
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        SocketMailbox(
            Keys.generate(), host="127.0.0.1", collective=cast(Collective, Lonely()), epoch=2, deadline_s=60.0
        )
    assert not started_since(before)
