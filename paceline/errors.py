"""The errors Paceline raises. Each message names the culprit and, where there is one, the remedy."""

import difflib
from collections.abc import Iterable, Sequence


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """The run was asked for something that does not exist or cannot be honoured."""


class PeerLost(PacelineError):
    """A worker or a server that this process was waiting for is gone."""


class DeadlineExceeded(PacelineError, TimeoutError):
    """A wait ended without its peer having answered; the message names the peer and what was awaited."""


class Aborted(PacelineError):
    """The run is being ended from outside while this process was waiting."""


class TensorMismatch(PacelineError, ValueError):
    """Ranks disagree on a tensor's name, shape or dtype."""


class CallMismatch(TensorMismatch):
    """Ranks ask for different operations, or wait for one another in two."""


class NonFiniteGradient(PacelineError, ArithmeticError):
    """A gradient holds NaN or infinity; the message names rank, step and parameter."""


class BudgetReached(PacelineError):
    """A script goes on stepping after its run has ended; the launcher takes this as the script's end."""


class RunFailed(PacelineError, RuntimeError):
    """A run ended before its budget; the message says who failed, at which step, and why."""


class NotWritten(RunFailed):
    """A file of the run's could not be written; what was there before is intact."""


def suggest(word: str, known: Iterable[str]) -> str:
    """A clause such as `; did you mean 'accuracy'?` or a list of what is known, for error messages.

    >>> suggest("acuracy", ["accuracy", "loss"])
    "; did you mean 'accuracy'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(names)}" if names else ""


def unknown(kind: str, word: str, known: Iterable[str], *, meant: Sequence[str] = ()) -> UsageError:
    """The error for a name that is not among the known ones, with what was meant, or else the near miss, suggested."""
    return UsageError(f"unknown {kind} {word!r}{f'; did you mean {meant[0]!r}?' if meant else suggest(word, known)}")
