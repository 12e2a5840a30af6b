"""What the last copy of a key range knows of the server that it gives one to."""

from dataclasses import dataclass, replace
from typing import final

from paceline.messages import Message
from paceline.server import entries
from paceline.server.tables.giving import Giving


@final
@dataclass
class Newcomer:
    server: int
    attempt: int = 0
    """Which it says with all that it says; 0: it was given nothing yet."""
    giving: Giving | None = None
    """Until it has all rows that were there when it began."""
    num_pieces: int = 0
    """Of them, that it was given."""
    waits_from: int | None = None
    """Entries after this one wait for its word, too, since it has what it was given."""
    is_there: bool = False
    """The launcher was told."""

    def instead_of(self, entry: Message) -> Message:
        """What it gets in place of this entry: updates of rows as what they have left of them, while it lacks some."""
        if self.giving is None or not entries.is_of_rows(entry):
            return entry
        return replace(entries.of_states(self.giving.changes()), clock=entry.clock, flags=entry.flags)

    def next_piece(self) -> Message | None:
        """Some more of the rows; none: it has been given all of them."""
        piece = None if self.giving is None else self.giving.piece()
        if piece is None:
            self.end_giving()
            return None
        self.num_pieces += 1
        return entries.of_piece(piece)

    def end_giving(self) -> None:
        """Nothing of changes is noted for it any more."""
        if self.giving is not None:
            self.giving.close()
        self.giving = None
