"""What the protocol is made of: shared secrets, masks that follow from them, and shares of a secret."""

import secrets
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 32
_PRIME = 2**521 - 1
SHARE_BYTES = 66
Words = npt.NDArray[np.uint32]
"""A vector modulo 2^32."""


class SecureError(Exception):
    """The round of secure aggregation cannot go on, or a message is not of it; the text says whose and why."""


def agreed(own: X25519PrivateKey, theirs: bytes, purpose: str) -> bytes:
    """What two clients alone know, each from its private and the other's public key. Raises SecureError if that is no
    key."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise SecureError(f"refused a public key: {error}") from None
    secret: bytes = HKDF(SHA256(), SECRET_BYTES, salt=None, info=purpose.encode()).derive(shared)
    return secret


def require_key(public: bytes) -> None:
    """Raises SecureError if nobody can agree on anything with this public key."""
    agreed(X25519PrivateKey.generate(), public, "")


def mask(seed: bytes, num_words: int) -> Words:
    """Pseudo-random words from a seed: AES-256 in counter mode."""
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * num_words)), dtype="<u4").astype(np.uint32)


def split(secret: bytes, holders: list[int], *, threshold: int) -> dict[int, bytes]:
    """A share for each holder. So many together have the secret, and fewer know nothing of it (Shamir, 1979)."""
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(_PRIME) for _ in range(threshold - 1))]

    def at(x: int) -> int:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % _PRIME
        return value

    return {holder: at(holder + 1).to_bytes(SHARE_BYTES) for holder in holders}


def joined(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from shares by their holders, at least the threshold of them. Raises SecureError for false ones."""
    if any(len(share) != SHARE_BYTES for share in shares.values()):
        raise SecureError(f"refused shares of clients {sorted(shares)}: they are not of {SHARE_BYTES} bytes")
    total = 0
    for holder, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != holder:
                numerator = numerator * (other + 1) % _PRIME
                denominator = denominator * (other - holder) % _PRIME
        total += int.from_bytes(share) * numerator * pow(denominator, -1, _PRIME)
    try:
        return (total % _PRIME).to_bytes(SECRET_BYTES)
    except OverflowError:
        raise SecureError(f"the shares of clients {sorted(shares)} are not of one secret") from None
