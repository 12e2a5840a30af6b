"""Zip files that say of themselves what they hold and whether they are whole.

The archive's comment, which zip readers skip and torch does too, holds facts as JSON and then a SHA-256 digest of
every byte before it.
"""

import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DIGEST_BYTES = 64  # in hexadecimal digits
_LENGTH = struct.Struct("<H")


def seal(archive: io.BytesIO, facts: Mapping[str, Any]) -> None:
    """Write facts and digest behind a zip archive that has no comment so far. Raises ValueError if the facts take more
    than a comment's 64 KiB."""
    said = json.dumps(facts).encode()
    if len(said) + _DIGEST_BYTES >= 1 << 16:
        raise ValueError(f"{len(said)} bytes of facts are too many")
    archive.seek(-_LENGTH.size, io.SEEK_END)
    archive.write(_LENGTH.pack(len(said) + _DIGEST_BYTES) + said)
    with archive.getbuffer() as content:
        digest = hashlib.sha256(content).hexdigest()
    archive.write(digest.encode())


def is_sealed(raw: bytes) -> bool:
    """Whether the archive holds facts and a digest, whatever they are worth. Raises ValueError if it is none."""
    return bool(_comment(io.BytesIO(raw)))


def require_whole(raw: bytes) -> None:
    """Raises ValueError if a sealed archive's bytes are not those that were sealed."""
    content, digest = memoryview(raw)[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError("its bytes are not those that its checksum is of")


def facts_of(path: Path) -> dict[str, Any]:
    """What a sealed file says of itself; the digest is not looked at. Raises ValueError if it says nothing, OSError if
    it cannot be read."""
    with path.open("rb") as file:
        facts = json.loads(_comment(file)[:-_DIGEST_BYTES])
    if not isinstance(facts, dict):
        raise ValueError(f"{path} says nothing of itself")
    return facts


def _comment(file: Any) -> bytes:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.comment
    except (zipfile.BadZipFile, NotImplementedError) as error:  # the latter: of a later version of zip, or damaged
        raise ValueError(str(error)) from None
