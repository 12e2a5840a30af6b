"""Ports that a test gives away before anybody listens there."""

from __future__ import annotations

import random
import socket
from contextlib import closing

GIVEN_TO_NOBODY = range(20_000, 32_000)
"""Above Ray's, and below those that Linux gives to who asks for any: whoever did might have the port by then."""


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(GIVEN_TO_NOBODY)
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
