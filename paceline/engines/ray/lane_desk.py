"""The launcher's answers to workers that take their own steps, of who has which of the data."""

from collections.abc import Callable, Mapping
from typing import Any, final

from paceline.elastic import Done, LaneBatch, LaneBook
from paceline.elastic.lane_book import in_words
from paceline.engines.ray.controller import Controller
from paceline.messages import Kind


@final
class LaneDesk:
    """
    Args:
        say: shows a line where the run was started.
    """

    def __init__(self, controller: Controller, *, num_workers: int, say: Callable[[str], None]) -> None:
        self._controller, self._say = controller, say
        self.book = LaneBook(num_workers)

    def gone(self, rank: int, done: Done) -> None:
        """This worker does nothing more, and so far its work counts."""
        self.book.gone(rank, done)
        self._controller.event("let_go", f"worker-{rank}", **done._asdict())

    def hear(self, body: Mapping[str, Any]) -> None:
        """A worker asks for its lane, or for what is left to it, or gives back what is left of its lane, or says how
        far others have the work of one that is gone; or it asks for all there is, to keep or to set it."""
        rank, book = body["rank"], self.book
        if not book.is_present(rank):  # it has died since
            return
        if "begins" in body:
            self._controller.tell(f"worker-{rank}", Kind.LANES, lane=book.begin(rank, epoch=body["begins"]))
        elif "gives_back" in body:
            book.give_back(rank, LaneBatch(*body["gives_back"]))
        elif "gone" in body:
            if book.is_present(body["gone"]):  # all who are there say so
                self.gone(body["gone"], Done(*body["done"]))
        elif "ended" in body:
            none = None if body["none"] is None else LaneBatch(*body["none"])
            batch = book.next_left_over(rank, epoch=body["ended"], none=none)
            self._controller.tell(f"worker-{rank}", Kind.LANES, batch=batch)
        else:
            if body["resumes"] is not None:
                book.resume(body["resumes"])
            self._controller.tell(f"worker-{rank}", Kind.LANES, lanes=book.plain)

    def end(self) -> None:
        """All have come to the end of their scripts: say what nobody has done."""
        left = self.book.left_over(self._controller.epochs.values())
        if left:
            self._controller.event("left_over", "run", batches=[each._asdict() for each in left])
            self._say(in_words(left))
