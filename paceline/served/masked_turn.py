"""A client's end of a round in which the server learns the sum of updates alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor

from paceline.messages import Message
from paceline.secure import Client, PublicKeys, Quantiser, SecureError, parties
from paceline.served.form import Refused
from paceline.served.masking import KEYS, SHARES, UNMASKING, VECTORS, Masking, heard, said

_KEY_BYTES = 32
_NUMBERS = range(2**31)
"""What numbers clients may have. With others a single share could be the secret."""


@final
class MaskedTurn:
    """What one client says in the stages of one attempt at a round.

    Args:
        number: of this client.
        told: what the server has said with the turn.
        round_number: of the turn.

    Raises:
        Refused: also from `answer` and `mask`: this client is to go no further.
    """

    def __init__(self, number: int, told: Mapping[str, Any], masking: Masking, *, round_number: int) -> None:
        clients, attempt, factor = told.get("clients"), told.get("attempt"), told.get("factor")
        if not isinstance(clients, list) or any(type(each) is not int or each not in _NUMBERS for each in clients):
            raise Refused("a turn under masks does not say who takes part in it")
        if not masking.least <= len(set(clients)) == len(clients):
            raise Refused(f"a turn under masks is for {masking.least} different clients or more")
        if number not in clients or not isinstance(attempt, str):
            raise Refused("a turn under masks is none of this client's")
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise Refused("a turn under masks does not say how much this client counts")
        graph, threshold = parties(
            sorted(clients),
            num_neighbours=masking.num_neighbours,
            part=masking.threshold,
            least=masking.least,
            seed=masking.graph_seed(round_number),
        )
        label = masking.label(round_number, attempt)
        with _refusing():
            self._client = Client(number, neighbours=graph[number], threshold=threshold, label=label)
        self._quantiser = Quantiser(masking.clip, len(clients))
        self._number, self._round, self._factor, self.attempt = number, round_number, float(factor), attempt
        self._shares: Mapping[int, bytes] | None = None
        self._said = {KEYS: self._message(KEYS, {number: b"".join(self._client.advertise())})}

    @property
    def may_mask(self) -> bool:
        """Whether the secrets of all who take part are there."""
        return self._shares is not None

    def keys(self) -> Message:
        """What the turn begins with."""
        return self._said[KEYS]

    @property
    def is_answered(self) -> bool:
        """Whether the server has this client's keys."""
        return SHARES in self._said

    def answer(self, message: Message) -> Message | None:
        """What to say to a message of the server's. The same one, when it comes again, is answered as before."""
        stage = message.body.get("stage")
        if message.body.get("attempt") != self.attempt or stage not in (KEYS, SHARES, VECTORS):
            return None
        if stage == SHARES:
            self._shares = heard(message)[0] if self._shares is None else self._shares
            return None
        following = SHARES if stage == KEYS else UNMASKING
        if following not in self._said:
            of, _ = heard(message)
            with _refusing():
                self._said[following] = self._shared(of) if stage == KEYS else self._revealed(of)
        return self._said[following]

    def _shared(self, keys: Mapping[int, bytes]) -> Message:
        return self._message(SHARES, self._client.share(_keys_in(keys)))

    def _revealed(self, arrived: Mapping[int, bytes]) -> Message:
        revealed = self._client.unmask(arrived.keys())
        return self._message(UNMASKING, revealed.seeds, gone=revealed.keys)

    def mask(self, vector: Tensor) -> memoryview:
        """The update under this client's masks, as it travels. Raises ValueError if an element is NaN."""
        assert self._shares is not None, "masks need the others' shares"
        words = self._quantiser.encode(vector * self._factor)
        with _refusing():
            return memoryview(self._client.mask(words, self._shares).astype("<u4").tobytes())

    def _message(self, stage: int, secrets: Mapping[int, bytes], *, gone: Mapping[int, bytes] | None = None) -> Message:
        return said(stage, self.attempt, secrets, gone=gone, number=self._round)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except SecureError as error:
        raise Refused(str(error)) from None


def _keys_in(secrets: Mapping[int, bytes]) -> dict[int, PublicKeys]:
    if any(len(each) != 2 * _KEY_BYTES for each in secrets.values()):
        raise Refused(f"the server has sent keys that are not of {_KEY_BYTES} bytes")
    return {client: PublicKeys(each[:_KEY_BYTES], each[_KEY_BYTES:]) for client, each in secrets.items()}
