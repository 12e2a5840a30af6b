"""Lists of keys that both ends remember, so that a list goes over the network once and has a name afterwards.

Li et al., OSDI 2014, section 4.2: workers push and pull the same keys again and again.
"""

import hashlib
from collections import OrderedDict
from typing import final

from torch import Tensor

from paceline.messages import WireError, as_bytes

_MOST_LISTS = 32


def signature_of(keys: Tensor) -> str:
    return hashlib.blake2b(as_bytes(keys), digest_size=16).hexdigest()


@final
class KeyCache:
    """One end of a connection. The other end sees the same lists in the same order, so that it forgets the same."""

    def __init__(self) -> None:
        self._lists: OrderedDict[str, Tensor] = OrderedDict()

    def knows(self, signature: str, keys: Tensor) -> bool:
        """The sender asks whether the name alone will do. The list is known from here on."""
        is_known = signature in self._lists
        self.note(signature, keys)
        return is_known

    def recall(self, signature: str) -> Tensor:
        """The receiver asks for the list of this name. Raises WireError if there is none."""
        if signature not in self._lists:
            raise WireError(f"no list of keys has the signature {signature[:32]!r}")
        self._lists.move_to_end(signature)
        return self._lists[signature]

    def note(self, signature: str, keys: Tensor) -> None:
        """The list is known from here on, and the one that was not used for longest may be forgotten."""
        self._lists[signature] = keys
        self._lists.move_to_end(signature)
        if len(self._lists) > _MOST_LISTS:
            self._lists.popitem(last=False)
