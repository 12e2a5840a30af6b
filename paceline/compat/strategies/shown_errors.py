"""Errors that Python shows by their message alone: a traceback would have the script look wrong."""

import sys
from types import TracebackType

MARK = "is_message_enough"
"""The attribute by which an error, or its class, says that its message is enough."""


def show_marked_alone() -> None:
    """Have Python show what is marked as one line, and all else as before. Once, however often it is called."""
    before = getattr(sys.excepthook, "before", sys.excepthook)

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(error, MARK, False):
            is_interrupt = isinstance(error, KeyboardInterrupt)
            print(str(error) or "interrupted" if is_interrupt else f"error: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    shown.before = before  # type: ignore[attr-defined]
    sys.excepthook = shown


def show_alone(error: BaseException) -> None:
    """Have Python show this error as one line, if nobody catches it."""
    setattr(error, MARK, True)
    show_marked_alone()
