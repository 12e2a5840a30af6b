"""What tells map-style data from other data: marks of a few samples, made where the data set is read."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from paceline.seeding import derive, preserved_random_state, seed_everything
from paceline.training.sharding.contents import digest_of

Mark = list[Any]
"""A text and some numbers, of a part of a sample. Texts are to be the same, numbers within rounding."""
Fingerprint = list[list[Mark]]
"""By sample, and its parts."""

_NUM_PARTS = 20
"""Parts of a sample that are looked at; more are left out."""
_UNKNOWN: Mark = ["", []]
"""The mark of a part that is missing, or not the same twice."""
_NUM_SUMS = 4
_MOST_VALUES = 2**16
_ROUNDING = 1e-2
"""How far numbers may be apart, as a share of the largest: processors and decoders of images round differently."""
_MORE_READS = 14
"""Where a sample is not as it was: what a data set draws anew may by chance be the same in two reads."""
_ROOM_BYTES = 2**14


def places(length: int, epoch: int) -> tuple[int, ...]:
    """The samples that are looked at: the first, the last, and one that is another in every epoch."""
    return 0, length - 1, derive(epoch, "look") % length


def fingerprint(dataset: Any, epoch: int, *, expected: Fingerprint | None = None) -> Fingerprint:
    """Marks of a few samples. What is drawn from the global generators is drawn alike on all ranks.

    Args:
        expected: what it was before; where it differs, samples are read more often.
    """
    found = _common(_read(dataset, epoch), _read(dataset, epoch))
    if expected is not None and first_unlike(found, expected) is not None:
        for _ in range(_MORE_READS):
            found = _common(found, _read(dataset, epoch))
    return found


def first_unlike(one: Fingerprint, other: Fingerprint) -> int | None:
    """The number of the first sample of which a part is known to differ."""
    return next((number for number, both in enumerate(zip(one, other, strict=False)) if _differ(*both)), None)


def _differ(one: Sequence[Mark], other: Sequence[Mark]) -> bool:
    return any(_UNKNOWN not in both and not _are_alike(*both) for both in zip(one, other, strict=False))


def _are_alike(one: Mark, other: Mark) -> bool:
    (text, numbers), (other_text, other_numbers) = one, other
    if text != other_text or len(numbers) != len(other_numbers):
        return False
    limit = _ROUNDING * max(map(abs, (*numbers, *other_numbers)), default=0.0)
    return all(abs(mine - theirs) <= limit for mine, theirs in zip(numbers, other_numbers, strict=True))


def _common(one: Fingerprint, other: Fingerprint) -> Fingerprint:
    return [
        [mark if _are_alike(mark, again) else _UNKNOWN for mark, again in zip(*both, strict=False)]
        for both in zip(one, other, strict=False)
    ]


def _read(dataset: Any, epoch: int) -> Fingerprint:
    with preserved_random_state():
        seed_everything(0)
        try:
            return [_marks(dataset[place]) for place in places(len(dataset), epoch)]
        except Exception:  # keys that are no indices, a sample that is broken: whoever reads it will say so
            return []


def _marks(sample: Any) -> list[Mark]:
    if isinstance(sample, Mapping):
        return [_mark(part, str(key)) for key, part in list(sample.items())[:_NUM_PARTS]]
    parts = sample if isinstance(sample, list | tuple) else [sample]
    return [_mark(part) for part in parts[:_NUM_PARTS]]


def _mark(part: Any, name: str = "") -> Mark:
    values = _measured(part)
    if values is None:
        return [f"{name} {digest_of(part)}", []]
    return [f"{name} {values.shape}", [float(f"{number:.6g}") for number in _sums(values)]]


def _measured(part: Any) -> NDArray[Any] | None:
    """Values that may be rounded: real numbers, and images' bytes."""
    if isinstance(part, float):
        return np.array([part])
    if isinstance(part, Tensor) and (part.is_floating_point() or part.dtype == torch.uint8):
        part = part.detach().cpu().double().numpy()
    if isinstance(part, np.ndarray | np.generic) and (part.dtype.kind == "f" or part.dtype == np.uint8):
        return np.asarray(part)
    return None


def _sums(values: NDArray[Any]) -> list[float]:
    """The root mean square of the values, and sums with fixed signs that are about as large."""
    flat = np.nan_to_num(values.reshape(-1)[:: 1 + values.size // _MOST_VALUES].astype(np.float64), posinf=0, neginf=0)
    norm = math.sqrt(max(1, flat.size))
    return [float(np.linalg.norm(flat)) / norm, *(_signs(flat.size) @ flat / norm).tolist()]


@functools.lru_cache(maxsize=8)
def _signs(count: int) -> NDArray[np.float64]:
    # numpy promises that RandomState draws the same in every version.
    return 2.0 * np.random.RandomState(0).randint(0, 2, (_NUM_SUMS, count)).astype(np.float64) - 1.0


@final
class FirstLook:
    """Has the first loader worker look at its copy of the data set as it starts: files may be open there that must not
    be opened here.

    Args:
        init: the script's own function for each loader worker.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init
        self._epoch: int | None = None
        self._expected: Fingerprint | None = None
        self._room = torch.zeros(_ROOM_BYTES, dtype=torch.uint8).share_memory_()
        self._length = torch.zeros(1, dtype=torch.int64).share_memory_()

    def begin(self, epoch: int | None, expected: Fingerprint | None = None) -> None:
        """Loader workers that start now read this epoch; none: they are not to look."""
        self._epoch, self._expected = epoch, expected

    @property
    def found(self) -> tuple[int, Fingerprint] | None:
        """The epoch at whose beginning a loader worker has looked last, and the fingerprint there."""
        length = int(self._length)
        if not length:
            return None
        epoch, found = json.loads(self._room[:length].numpy().tobytes())
        return epoch, found

    def __call__(self, worker_id: int) -> None:
        if self._init is not None:
            self._init(worker_id)
        if worker_id == 0 and self._epoch is not None:
            info: Any = get_worker_info()
            found = fingerprint(info.dataset, self._epoch, expected=self._expected)
            said = np.frombuffer(json.dumps([self._epoch, found]).encode(), dtype=np.uint8)
            if said.size <= _ROOM_BYTES:
                self._length.zero_()  # who reads meanwhile finds nothing
                self._room[: said.size] = torch.from_numpy(said.copy())
                self._length.fill_(said.size)
