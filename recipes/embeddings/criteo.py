"""Reads clicks in the format of Criteo's data sets (Kaggle display advertising challenge, 2014; terabyte click logs).

A line has a label (0 or 1), 13 whole numbers and 26 categories of up to 8 hexadecimal digits, with tabs between them.
What is missing is empty.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

NUM_COUNTS, NUM_COLUMNS = 13, 26
NUM_KEYS = NUM_COLUMNS << 32
MOST_SHARED = 1 << 31
_LINE = re.compile(rf"[01](\t(-?[0-9]{{1,18}})?){{{NUM_COUNTS}}}(\t[0-9a-fA-F]{{0,8}}){{{NUM_COLUMNS}}}")


class Line(NamedTuple):
    number: int
    """From 1."""
    text: str


class Clicks(NamedTuple):
    """A batch."""

    labels: Tensor
    """float32 of shape (batch,), 0 or 1."""
    counts: Tensor
    """float32 of shape (batch, 13): log(1 + x), and 0 where x is missing or negative."""
    keys: Tensor
    """int64: of the categories that are there, sample by sample and there column by column."""
    offsets: Tensor
    """int64 of shape (batch * 26,): where among the keys those of a sample and column begin, of which there is one or
    none."""


@final
class Lines(IterableDataset[Line]):
    """Lines `begin` to `end` - 1, counted from 0, of a file, or of those that are in memory.

    A file is read as its lines are asked for, and so may be larger than memory.
    """

    def __init__(self, source: Path | Sequence[str], *, begin: int = 0, end: int | None = None) -> None:
        self._source, self._begin, self._end = source, begin, end

    def __iter__(self) -> Iterator[Line]:
        if not isinstance(self._source, Path):
            yield from self._numbered(self._source)
            return
        with self._source.open(encoding="utf-8", errors="backslashreplace") as file:
            yield from self._numbered(file)

    def _numbered(self, texts: Iterable[str]) -> Iterator[Line]:
        for number, text in enumerate(itertools.islice(texts, self._begin, self._end), self._begin + 1):
            yield Line(number, text.rstrip("\r\n"))


def parse(lines: Sequence[Line], *, source: object) -> Clicks:
    """A batch of these lines. A category's key is its column's number times 2**32, plus its digits as a number. So two
    categories of a column have the same key only if they are the same number, as `a`, `0a` and `A` are.

    Raises:
        ValueError: a line is something else; the message names the source and the line.
    """
    labels, counts, keys, offsets = [], [], [], []
    for number, text in lines:
        if _LINE.fullmatch(text) is None:
            raise ValueError(
                f"{source}, line {number}: {text[:80]!r} is no label (0 or 1), {NUM_COUNTS} whole numbers and "
                f"{NUM_COLUMNS} categories of at most 8 hexadecimal digits, with tabs between them"
            )
        fields = text.split("\t")
        labels.append(float(fields[0]))
        counts.append([max(int(field or 0), 0) for field in fields[1 : 1 + NUM_COUNTS]])
        for column, field in enumerate(fields[1 + NUM_COUNTS :]):
            offsets.append(len(keys))
            if field:
                keys.append((column << 32) + int(field, 16))
    return Clicks(
        torch.tensor(labels),
        torch.tensor(counts).float().log1p(),
        torch.tensor(keys, dtype=torch.int64),
        torch.tensor(offsets),
    )


def shared(keys: Tensor, num_rows: int) -> Tensor:
    """Keys below `num_rows`, for a table of so many rows, at most `MOST_SHARED`. Those that hash alike share one
    (Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009): of n keys about
    n**2 / (2 * num_rows) pairs do."""
    return ((keys * -7046029254386353131) >> 33 & MOST_SHARED - 1) % num_rows
