"""How clients of a served run hide their updates from its server: what both ends know, and what they say in a stage.

The protocol is that of `paceline.secure`. A stage's message says of which clients its secrets are, and has these one
after the other, all of one size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.messages import Kind, Message, raw_bytes
from paceline.seeding import derive
from paceline.served.form import EPOCH, Refused

KEYS, SHARES, VECTORS, UNMASKING = 1, 2, 3, 4
MOST_NEIGHBOURS = 1000
"""The most neighbours that a client may have: their shares are one frame, and their complete graph is 33 MB at each
client."""


@dataclass(frozen=True)
class Masking:
    """
    Args:
        clip: elements of updates are rounded to levels between -clip and clip.
        num_neighbours: with whom a client shares secrets; none: with all of the round.
        threshold: the part of a client and its neighbours that has to stay until the end.
        least: fewer clients do not hide one another.
        num_elements: of an update.
        seed: of the run, which both ends know.
    """

    clip: float
    num_neighbours: int | None
    threshold: float
    least: int
    num_elements: int
    seed: int

    def graph_seed(self, round_number: int) -> int:
        return derive(self.seed, "secure", "graph", round_number)

    def label(self, round_number: int, attempt: str) -> str:
        """What messages between clients are bound to."""
        return f"{self.seed} {round_number} {attempt}"


def said(
    stage: int, attempt: str, secrets: Mapping[int, bytes], *, gone: Mapping[int, bytes] | None = None, number: int
) -> Message:
    """A stage's message.

    Args:
        gone: of clients whose vectors have not arrived; known in the last stage alone.
        number: of the round.
    """
    body = {"stage": stage, "attempt": attempt, "of": list(secrets), "gone": list(gone or ())}
    content = b"".join((*secrets.values(), *(gone or {}).values()))
    return Message(Kind.SECRETS, EPOCH, iteration=number, body=body, payload=[content])


def heard(message: Message) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The secrets of a stage's message: of those who are there, and of those who have gone. Raises Refused."""
    of, gone = (_numbers(message.body.get(name)) for name in ("of", "gone"))
    clients = [*of, *gone]
    content = bytes(raw_bytes(message.payload[0])) if message.payload else b""
    size = len(content) // max(1, len(clients))
    if size * len(clients) != len(content) or len(set(clients)) != len(clients):
        raise Refused(f"{len(content):,} bytes of secrets are not those of {len(clients)} clients")
    each = {client: content[place * size : (place + 1) * size] for place, client in enumerate(clients)}
    return {client: each[client] for client in of}, {client: each[client] for client in gone}


def _numbers(found: Any) -> Sequence[int]:
    if not isinstance(found, list) or any(type(each) is not int or each < 0 for each in found):
        raise Refused("a message of secrets does not say of which clients they are")
    return found
