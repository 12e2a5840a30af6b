"""The server's end of a round in which it learns the sum of updates alone."""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import numpy as np
from torch import Tensor

from paceline.messages import Message
from paceline.secure import PublicKeys, Quantiser, Revealed, SecureError, Server, parties
from paceline.served.form import Refused
from paceline.served.masking import KEYS, SHARES, UNMASKING, VECTORS, Masking, heard, said

_KEY_BYTES = 32


class Sum(NamedTuple):
    """What a round came to."""

    vector: Tensor
    """The sum of updates, each times its client's weight; 1-D, float64."""
    weight: float
    clients: tuple[int, ...]
    """The clients whose updates it is the sum of."""


@final
class MaskedRound:
    """The stages of one attempt at a round. Whoever carries messages says when a stage ends.

    Args:
        weights: of the clients that were drawn, by their numbers.
    """

    def __init__(self, weights: Mapping[int, float], masking: Masking, *, number: int) -> None:
        self._clients, self._number = sorted(weights), number
        self._largest = max(weights.values())
        self._factors = {client: weight / self._largest for client, weight in weights.items()}
        self._attempt = secrets.token_hex(8)  # so that nobody masks twice with the same secrets
        graph, threshold = parties(
            self._clients,
            num_neighbours=masking.num_neighbours,
            part=masking.threshold,
            least=masking.least,
            seed=masking.graph_seed(number),
        )
        self._server = Server(graph, threshold=threshold, num_elements=masking.num_elements)
        self._quantiser = Quantiser(masking.clip, len(weights))
        self.stage = KEYS
        self._takes_part, self._has_sent, self._lost = set(weights), set[int](), set[int]()
        self._answers: dict[int, Message] = {}
        """By client: its answer at the end of the stage that ended last."""
        self.sum: Sum | None = None
        self.failure: str | None = None
        """Why there is no sum."""

    @property
    def is_over(self) -> bool:
        return self.sum is not None or self.failure is not None

    @property
    def awaited(self) -> set[int]:
        """Who has not sent this stage's message yet, and may."""
        return self._takes_part - self._has_sent - self._lost

    def told(self, client: int) -> dict[str, Any]:
        """What a client is told with its turn."""
        return {"clients": self._clients, "attempt": self._attempt, "factor": self._factors[client]}

    def lose(self, client: int) -> None:
        """The client's process has ended, and with it the secrets of its turn."""
        self._lost.add(client)

    def answer_again(self, client: int) -> list[Message]:
        """What a client may not have heard."""
        return [self._answers[client]] if client in self._answers else []

    def receive(self, client: int, message: Message) -> None:
        """A stage's message of a client's. One that comes twice, or of another stage, changes nothing. Raises
        Refused."""
        stage = message.body.get("stage")
        is_due = stage == self.stage and stage != VECTORS and client in self.awaited and not self.is_over
        if not self.is_of_it(message.body.get("attempt")) or not is_due:
            return
        of, gone = heard(message)
        try:
            if stage == KEYS:
                self._server.receive_keys(client, _keys_in(of.get(client, b"")))
            elif stage == SHARES:
                self._server.receive_shares(client, of)
            elif stage == UNMASKING:
                self._server.receive_revealed(client, Revealed(of, gone))
        except SecureError as error:
            raise Refused(str(error)) from None
        self._has_sent.add(client)

    def is_of_it(self, attempt: object) -> bool:
        """Whether a message is of this attempt."""
        return attempt == self._attempt

    def takes(self, client: int) -> bool:
        """Whether a client's vector is due."""
        return self.stage == VECTORS and client in self.awaited and not self.is_over

    @property
    def is_enough(self) -> bool:
        """Whether those whose vectors have come are enough for a sum."""
        return self._server.can_unmask()

    def take_vector(self, client: int, content: bytearray) -> None:
        self._server.receive_vector(client, np.frombuffer(content, dtype="<u4").astype(np.uint32))
        self._has_sent.add(client)

    def end_stage(self) -> dict[int, Message]:
        """Go on with those who have sent; what each is to be told."""
        try:
            secrets_for = self._answered()
        except SecureError as error:
            self.failure = str(error)
            return {}
        self._answers = {
            client: said(self.stage, self._attempt, each, number=self._number) for client, each in secrets_for.items()
        }
        self._takes_part, self._has_sent, self.stage = set(secrets_for), set(), self.stage + 1
        return self._answers

    def _answered(self) -> Mapping[int, Mapping[int, bytes]]:
        server = self._server
        if self.stage == KEYS:
            return {u: {v: b"".join(keys) for v, keys in near.items()} for u, near in server.keys_for().items()}
        if self.stage == SHARES:
            return server.shares_for()
        if self.stage == VECTORS:
            return {u: dict.fromkeys(near, b"") for u, near in server.arrived_for().items()}
        clients = server.arrived
        total = self._quantiser.decode(server.total(), num_summed=len(clients))
        weight = sum(self._factors[client] for client in clients)
        self.sum = Sum(total, weight, clients)
        return {}


def _keys_in(content: bytes) -> PublicKeys:
    if len(content) != 2 * _KEY_BYTES:
        raise Refused(f"its keys have {len(content):,} bytes, not {2 * _KEY_BYTES}")
    return PublicKeys(content[:_KEY_BYTES], content[_KEY_BYTES:])
