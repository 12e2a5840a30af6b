"""Records in the order in which workers have their turns, whenever it is heard what they did in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

from paceline.records import Record


@final
class RecordsInOrder:
    """Hands on each turn's records when all earlier turns are over.

    Args:
        emit: gets them.
    """

    def __init__(self, emit: Callable[[Record], None]) -> None:
        self._emit = emit
        self._turns: deque[int] = deque()
        self._records: dict[int, list[Record]] = {}
        self._ended: set[int] = set()

    def begin(self, turn: int) -> None:
        """A turn later than all before."""
        self._turns.append(turn)
        self._records[turn] = []

    def add(self, turn: int, record: Record) -> None:
        if self._turns[0] == turn:
            self._emit(record)
        else:
            self._records[turn].append(record)

    def end(self, turn: int) -> None:
        self._ended.add(turn)
        while self._turns and self._turns[0] in self._ended:
            first = self._turns.popleft()
            self._ended.remove(first)
            del self._records[first]
            if self._turns:
                self._let_out(self._turns[0])

    def close(self) -> None:
        """Hand on what is left, in order."""
        while self._turns:
            self.end(self._turns[0])

    def _let_out(self, turn: int) -> None:
        records, self._records[turn] = self._records[turn], []
        for record in records:
            self._emit(record)
