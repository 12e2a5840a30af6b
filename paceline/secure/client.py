"""A client's end of secure aggregation."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.secure.secrets import SECRET_BYTES, SHARE_BYTES, SecureError, Words, agreed, joined, mask, split

_NONCE_BYTES, _TAG_BYTES = 12, 16
SEALED_BYTES = _NONCE_BYTES + 2 * SHARE_BYTES + _TAG_BYTES
"""The size of the sealed shares for one neighbour."""
_ENCRYPTION, _MASK = "paceline secure aggregation: shares", "paceline secure aggregation: mask"


class PublicKeys(NamedTuple):
    """32 bytes each: one for messages between clients, one for the masks that they have in common."""

    messages: bytes
    masks: bytes


@dataclass(frozen=True)
class Revealed:
    """Shares by whose secret they are of: of a client whose vector has arrived the seed of its own mask, of one that
    has gone the key of the masks that it has in common with others."""

    seeds: Mapping[int, bytes] = field(default_factory=dict)
    keys: Mapping[int, bytes] = field(default_factory=dict)


@final
class Client:
    """One client in one round; each method is called once, in this order: advertise, share, mask, unmask.

    Args:
        number: of this client, from 0.
        neighbours: the numbers of those it shares secrets with, as the server cannot choose them.
        threshold: clients who together can undo a mask; more than half of the neighbours and the client itself, or the
            server could ask some for one secret and the rest for the other.
        label: of the round, the same on all clients; messages of another are refused.

    Raises:
        SecureError: from any method, where this client is not to go on. It has then revealed nothing more.
    """

    def __init__(self, number: int, *, neighbours: Collection[int], threshold: int, label: str) -> None:
        if not (len(neighbours) + 1) // 2 < threshold <= len(neighbours) + 1:
            raise SecureError(
                f"threshold={threshold} must be more than half of {len(neighbours) + 1} share holders, and no more"
            )
        self._number, self._neighbours, self._threshold = number, frozenset(neighbours), threshold
        self._label = label
        self._messages_key, self._masks_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(SECRET_BYTES)
        self._keys: dict[int, PublicKeys] = {}
        self._shares: dict[int, tuple[bytes, bytes]] = {}
        self._has_shared = self._has_masked = self._has_revealed = False

    def advertise(self) -> PublicKeys:
        return PublicKeys(
            self._messages_key.public_key().public_bytes_raw(), self._masks_key.public_key().public_bytes_raw()
        )

    def share(self, keys: Mapping[int, PublicKeys]) -> dict[int, bytes]:
        """Encrypted shares of this client's two secrets, by the neighbour that each is for.

        Args:
            keys: of the neighbours that are there.
        """
        self._require_among(keys, self._neighbours, "keys")
        self._require_enough(len(keys) + 1, "neighbours have sent keys, itself included")
        if self._has_shared or len(set(keys.values()) | {self.advertise()}) <= len(keys):
            raise SecureError(f"client {self._number} was given keys twice, or one of them for several clients")
        self._has_shared, self._keys = True, dict(keys)
        holders = [self._number, *keys]
        seeds = split(self._seed, holders, threshold=self._threshold)
        private = split(self._masks_key.private_bytes_raw(), holders, threshold=self._threshold)
        self._shares[self._number] = seeds[self._number], private[self._number]
        return {other: self._encrypted(other, seeds[other] + private[other]) for other in keys}

    def mask(self, vector: Words, sealed: Mapping[int, bytes]) -> Words:
        """The vector under this client's masks.

        Args:
            sealed: the shares for this client, by who has sent them.
        """
        self._require_among(sealed, self._keys, "shares")
        self._require_enough(len(sealed) + 1, "neighbours have sent shares, itself included")
        if self._has_masked:
            raise SecureError(f"client {self._number} was asked for its vector twice")
        for other, each in sealed.items():
            opened = self._decrypted(other, each)
            self._shares[other] = opened[: len(opened) // 2], opened[len(opened) // 2 :]
        self._has_masked = True
        masked = vector + mask(self._seed, len(vector))
        for other in sealed:
            add_common_mask(masked, self._masks_key, self._keys[other].masks, sign=1 if self._number > other else -1)
        return masked

    def unmask(self, arrived: Collection[int]) -> Revealed:
        """Shares with which the server undoes masks.

        Args:
            arrived: those of the neighbours, and this client if its own has, whose vectors the server has.
        """
        self._require_among(arrived, self._shares, "vectors")
        self._require_enough(len(arrived), "vectors have arrived")
        if not self._has_masked or self._has_revealed:
            raise SecureError(f"client {self._number} was asked to reveal shares twice, or before it sent its vector")
        self._has_revealed = True
        gone = self._shares.keys() - set(arrived)
        return Revealed({u: self._shares[u][0] for u in arrived}, {u: self._shares[u][1] for u in gone})

    def _encrypted(self, other: int, secret: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed: bytes = self._cipher(other).encrypt(nonce, secret, self._about(self._number, other))
        return nonce + sealed

    def _decrypted(self, other: int, sealed: bytes) -> bytes:
        try:
            about = self._about(other, self._number)
            opened: bytes = self._cipher(other).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], about)
        except (InvalidTag, ValueError):
            raise SecureError(f"client {self._number} cannot open the shares of client {other}") from None
        return opened

    def _cipher(self, other: int) -> AESGCM:
        return AESGCM(agreed(self._messages_key, self._keys[other].messages, _ENCRYPTION))

    def _about(self, sender: int, receiver: int) -> bytes:
        return f"{self._label} {sender} {receiver}".encode()

    def _require_among(self, given: Collection[int], known: Collection[int], what: str) -> None:
        if strangers := set(given) - set(known):
            raise SecureError(f"client {self._number} was given {what} of {sorted(strangers)}, who are no neighbours")

    def _require_enough(self, count: int, what: str) -> None:
        if count < self._threshold:
            raise SecureError(f"client {self._number} goes no further: {count} {what}, and {self._threshold} must be")


def add_common_mask(vector: Words, own: X25519PrivateKey, theirs: bytes, *, sign: int) -> None:
    """Add the mask that two clients have in common, in place, or subtract it: in the sum of both it is gone."""
    common = mask(agreed(own, theirs, _MASK), len(vector))
    if sign > 0:
        vector += common
    else:
        vector -= common


def key_of(shares: Mapping[int, bytes], public: bytes, *, number: int) -> X25519PrivateKey:
    """The private key of a client that has gone. Raises SecureError unless it is the one of its public key."""
    key = X25519PrivateKey.from_private_bytes(joined(shares))
    if key.public_key().public_bytes_raw() != public:
        raise SecureError(f"the shares of client {number}'s key are not of the key that it advertised")
    return key
