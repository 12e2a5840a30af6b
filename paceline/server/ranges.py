"""Contiguous key ranges: who owns which elements of the flat parameter vector."""

from dataclasses import dataclass

from torch import Tensor

from paceline.errors import UsageError
from paceline.layout import ALIGNMENT_BYTES, Layout


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of one segment; of exactly one tensor if `shape` is given."""

    segment: int
    start: int
    stop: int
    shape: tuple[int, ...] | None = None

    def view(self, layout: Layout, buffer: Tensor) -> Tensor:
        """This piece of the layout's uint8 buffer: 1-D, or in its tensor's shape."""
        flat = layout.segments[self.segment].view(buffer)[self.start : self.stop]
        return flat if self.shape is None else flat.view(self.shape)

    def num_bytes(self, layout: Layout) -> int:
        return (self.stop - self.start) * layout.segments[self.segment].dtype.itemsize


KeyRange = tuple[Piece, ...]


def cut(layout: Layout, *, num_servers: int, whole_tensors: bool, piece_bytes: int | None = None) -> list[KeyRange]:
    """Cut the layout into `num_servers` contiguous ranges of about equal bytes (Li et al., OSDI 2014, section 4.1).

    Args:
        whole_tensors: cut between tensors only, for optimizers whose update of an element depends on others.
        piece_bytes: no piece is to be larger, a multiple of a cache line; whole tensors are left as they are.

    A model that is too small leaves some ranges empty; see `require_some_for_each`.
    """
    atoms = _tensors(layout) if whole_tensors else _segments(layout)
    total = sum(atom.num_bytes(layout) for atom in atoms)
    ranges: list[list[Piece]] = [[] for _ in range(num_servers)]
    before = 0
    owner = -1
    for index, atom in enumerate(atoms):
        size = atom.num_bytes(layout)
        if whole_tensors:
            # Where the middle of the tensor falls; but no server is left out, nor are too few left for those after.
            middle = (before + size // 2) * num_servers // total
            owner = min(max(min(middle, owner + 1), num_servers - len(atoms) + index), num_servers - 1)
            ranges[owner].append(atom)
        else:
            _share(layout, atom, before, total, ranges)
        before += size
    if piece_bytes is None or whole_tensors:
        return [tuple(pieces) for pieces in ranges]
    return [tuple(small for piece in pieces for small in _slice(layout, piece, piece_bytes)) for pieces in ranges]


def require_some_for_each(layout: Layout, *, num_servers: int, whole_tensors: bool) -> None:
    """Raises UsageError if there are fewer tensors, or cache lines of parameters, than servers."""
    num_bytes = sum(segment.num_bytes for segment in layout.segments)
    num_places = len(_tensors(layout)) if whole_tensors else num_bytes // ALIGNMENT_BYTES
    if num_places < num_servers:
        kind = "tensors" if whole_tensors else "cache lines of parameters"
        raise UsageError(f"servers={num_servers} leaves a server without parameters: the model has {num_places} {kind}")


def span_bytes(layout: Layout, pieces: KeyRange) -> tuple[int, int]:
    """Where in the layout's buffer these pieces, which are in order, begin and end."""
    first, last = pieces[0], pieces[-1]

    def place(piece: Piece, element: int) -> int:
        segment = layout.segments[piece.segment]
        return segment.start_bytes + element * segment.dtype.itemsize

    return place(first, first.start), place(last, last.stop)


def in_shards(pieces: KeyRange, *, whole: bool) -> list[KeyRange]:
    """What each shard of a server holds: one piece, or all, for optimizers that must see whole tensors. A server
    without a piece has an empty shard, which still counts what workers push."""
    return [pieces] if whole or not pieces else [(piece,) for piece in pieces]


def _tensors(layout: Layout) -> list[Piece]:
    return [
        Piece(index, slot.offset, slot.stop, slot.spec.shape)
        for index, segment in enumerate(layout.segments)
        for slot in segment.slots
        if slot.spec.num_elements
    ]


def _segments(layout: Layout) -> list[Piece]:
    return [Piece(index, 0, segment.num_elements) for index, segment in enumerate(layout.segments)]


def _share(layout: Layout, atom: Piece, before: int, total: int, ranges: list[list[Piece]]) -> None:
    """Cut one segment, which starts `before` bytes into the whole, at the servers' boundaries inside it."""
    itemsize = layout.segments[atom.segment].dtype.itemsize
    start = atom.start
    for owner, pieces in enumerate(ranges):
        boundary = total * (owner + 1) // len(ranges) - before
        boundary -= boundary % ALIGNMENT_BYTES  # never two servers on one cache line
        stop = atom.stop if owner == len(ranges) - 1 else min(atom.stop, boundary // itemsize)
        if stop > start:
            pieces.append(Piece(atom.segment, start, stop))
            start = stop


def _slice(layout: Layout, piece: Piece, piece_bytes: int) -> list[Piece]:
    step = piece_bytes // layout.segments[piece.segment].dtype.itemsize
    starts = range(piece.start, piece.stop, step)
    return [Piece(piece.segment, start, min(start + step, piece.stop)) for start in starts]
