"""Batches that a script has trained on and holds on to, since it may train on them again."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final
from weakref import ref

from torch import Tensor

from paceline.training.sharding.part import Place

_FEW = 32
_MANY = 16
_NUM_VALUES = 32


@dataclass(eq=False, slots=True)  # not frozen, as every step makes one
class Handed:
    """A batch that the script was given."""

    place: Place
    num_samples: int
    weight: float
    tensors: tuple[ref[Tensor], ...]

    @property
    def alive(self) -> list[Tensor]:
        """The tensors of it that the script still holds."""
        found = [tensor for weak in self.tensors if (tensor := weak()) is not None]
        for tensor in found:
            tensor._fix_weakref()  # type: ignore[attr-defined]  # as torch.utils.weak, whose references take longer to make
        return found

    @property
    def memory(self) -> list[range]:
        """Where these lie."""
        return [range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in self.alive]


@final
class KeptBatches:
    """By the storage that their tensors lie in. Those that the script has dropped count for nothing."""

    def __init__(self) -> None:
        self._new: list[Handed] = []  # which nobody has asked for yet
        self._in_storage: dict[int, dict[Handed, None]] = {}
        self._latest: dict[tuple[int, ...], Handed] = {}  # by the identities of their tensors
        self._num_added = self._num_held = 0  # since, and when, it was looked which ones the script has dropped

    def add(self, handed: Handed) -> None:
        """The latest one counts of those that are the same tensors, as of a data set that holds its batches."""
        for weak in handed.tensors:
            if weak() is not None:
                break
        else:
            return  # as of most scripts
        self._new.append(handed)
        self._num_added += 1
        if self._num_added > self._num_held + _FEW:
            self.forget_dropped()

    def _take_in(self) -> None:
        new, self._new = self._new, []
        for handed in new:
            self._put(handed)

    def _put(self, handed: Handed) -> None:
        alive = handed.alive
        if not alive:
            return
        tensors = tuple(map(id, alive))
        before, self._latest[tensors] = self._latest.get(tensors), handed
        for storage in set(map(_storage, alive)):
            beside = self._in_storage.setdefault(storage, {})
            if before is not None:
                beside.pop(before, None)
            beside[handed] = None

    def forget_dropped(self) -> None:
        held = list(self)
        self._in_storage.clear()
        self._latest.clear()
        self._num_added, self._num_held = 0, len(held)
        for handed in held:
            self._put(handed)

    def beside(self, tensors: Iterable[Tensor]) -> Iterator[Handed]:
        """The kept batches that have storage in common with these."""
        self._take_in()
        return (handed for tensor in tensors for handed in self._in_storage.get(_storage(tensor), ()))

    def __iter__(self) -> Iterator[Handed]:
        """The kept batches that the script holds."""
        self._take_in()
        every = dict.fromkeys(handed for some in self._in_storage.values() for handed in some)
        return (handed for handed in every if handed.alive)

    def __bool__(self) -> bool:
        self._take_in()
        return bool(self._in_storage)


@final
class Copies:
    """Tells copies of batches by their shape and some of their values, whatever became of the batches."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Handed] = {}  # the first are the oldest

    def add(self, handed: Handed, tensors: Sequence[Tensor]) -> None:
        """The script gets this batch, of these tensors."""
        for tensor in tensors[:1]:
            self._known[_mark(tensor)] = handed
            if len(self._known) > _MANY:
                del self._known[next(iter(self._known))]

    def __bool__(self) -> bool:
        return bool(self._known)

    def of(self, tensors: Iterable[Tensor]) -> list[Handed]:
        """The batches that these are copies of."""
        marks = (_mark(tensor) for tensor in tensors)
        return list(dict.fromkeys(self._known[mark] for mark in marks if mark in self._known))


def _mark(tensor: Tensor) -> Hashable:
    flat = tensor.detach().reshape(-1)
    return tuple(tensor.shape), tuple(flat[:: flat.numel() // _NUM_VALUES | 1].tolist())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
