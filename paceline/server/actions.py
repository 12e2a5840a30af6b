"""What a server's core, or a worker's, says to do: who carries messages does it."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.messages import Message
from paceline.records import UpdateRecord
from paceline.server.part import Part


class Send(NamedTuple):
    """Send this now; of a server, to a worker."""

    to: int
    message: Message


class Updated(NamedTuple):
    """A shard has been updated."""

    part: Part
    num_contributions: int
    records: Sequence[UpdateRecord]
    """One record for each contribution, from the server's last shard."""
    row_bytes: int = 0
    """Read and written for rows of tables, which are updated with the last shard."""


class BesideNext(NamedTuple):
    """Workers elsewhere have their answers. Those on this host, which may take the core when they wake, come next."""


Action = Send | Updated | BesideNext
