"""Who is to blame for a failed run: one error, from what every member said last."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engines.scripting import Outcome
from paceline.errors import PacelineError, RunFailed, UsageError


@dataclass(frozen=True)
class Statement:
    """What is known of one member of a run that is ending."""

    name: str
    """`worker-0`, `server-1`."""
    pid: int | None
    num_steps: int
    """Steps (of a server: updates) that it had done when it was last heard of."""
    outcome: Outcome | None = None
    """How it ended; none: it died, or has not ended."""
    is_dead: bool = False

    @property
    def who(self) -> str:
        name = self.name.replace("-", " ")
        return f"{name} (process {self.pid})" if self.pid is not None else name

    @property
    def is_worker(self) -> bool:
        return self.name.startswith("worker")

    def is_named_in(self, message: str) -> bool:
        """Whether the message is about this worker's own rank."""
        return re.search(rf"\brank {self.name.partition('-')[2]}(?!\d)", message) is not None

    @property
    def last_step(self) -> int:
        return max(self.num_steps, self.outcome.num_steps if self.outcome is not None else 0)


def judge(members: Sequence[Statement], *, is_training: bool, is_synchronous: bool, besides: str = "") -> PacelineError:
    """The run's error: deaths before failures, causes before their consequences.

    Args:
        is_synchronous: no worker ends a step without all members, so that the survivors' step is that of the dead.
        besides: what else is known of deaths.
    """
    dead = [member for member in members if member.is_dead]
    if dead:
        return RunFailed("\n".join(_death(member, members, is_training, is_synchronous) for member in dead) + besides)
    failed = [(member, member.outcome) for member in members if member.outcome and member.outcome.error is not None]
    causes = [(member, outcome) for member, outcome in failed if not outcome.is_consequence]
    if causes:
        return _failure(causes, is_alone=len(causes) == len(failed) and len(failed) > 1)
    return RunFailed(_silence(failed, members))


def _death(member: Statement, members: Sequence[Statement], is_training: bool, is_synchronous: bool) -> str:
    survivors = [other for other in members if other.is_worker and not other.is_dead]
    if not is_training:
        return f"{member.who} died before training began"
    if is_synchronous and survivors:
        return f"{member.who} died during step {1 + max(other.last_step for other in [*survivors, member])}"
    if member.is_worker:
        return f"{member.who} died during step {1 + member.num_steps} or shortly after"
    return f"{member.who} died after update {member.num_steps} or shortly after"


def _failure(causes: Sequence[tuple[Statement, Outcome]], *, is_alone: bool) -> PacelineError:
    # Where every rank reports the same trouble, one that says what its script did knows most, and then the one whose
    # own tensor it is.
    member, outcome = min(
        causes, key=lambda cause: (not cause[1].is_usage, not cause[0].is_named_in(cause[1].message), cause[0].name)
    )
    where = f"{member.who} failed after step {outcome.num_steps}: "
    if outcome.is_usage:
        # What every rank says alike is nobody's in particular.
        says_the_same = is_alone and len({each.message for _, each in causes}) == 1
        return UsageError(outcome.message if says_the_same else where + outcome.message)
    if outcome.is_memory:
        where += "it has run out of memory; use smaller batches, or fewer workers a host. "
    if not outcome.traceback:
        return RunFailed(where + outcome.message)
    return RunFailed(f"{where}{outcome.error}\n\n{outcome.traceback}".rstrip())


def _silence(failed: Sequence[tuple[Statement, Outcome]], members: Sequence[Statement]) -> str:
    """Some gave up waiting, and nobody says why: those who have not even ended are who was waited for."""
    first, outcome = min(failed, key=lambda failure: failure[0].name)
    text = f"{first.who} failed after step {first.last_step}: {outcome.message}"
    silent = [member for member in members if member.is_worker and member.outcome is None]
    if not silent:
        return text
    hanging = ", ".join(f"{member.who} hangs after step {member.num_steps}" for member in silent)
    return f"{hanging}; {text}"
