"""The coordinator's half of the protocol: who is left, and from which step they go on."""

from dataclasses import dataclass, replace
from typing import final

from paceline.elastic.messages import Form, Report, StaleEpoch
from paceline.errors import RunFailed
from paceline.membership import Membership


@final
@dataclass(frozen=True)
class Coordinator:
    """A value: each event makes the next one, and the word to send to all members, if they can go on.

    An epoch ends when somebody is gone, and the next one begins when all others have stopped and said so. Whoever
    is gone must be known to be dead: one that is only silent has to be ended first, or it could apply a step that the
    others repeat.
    """

    membership: Membership
    """Of the present epoch, with those who have died in it."""
    at_least: int = 1
    living: tuple[int, ...] = ()
    reports: tuple[Report, ...] = ()
    """Of the living, in this epoch."""

    @classmethod
    def first(cls, membership: Membership, *, at_least: int = 1) -> "Coordinator":
        return cls(membership, at_least, membership.ranks)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The living who have not stopped, while others wait for the next epoch."""
        said = {report.rank for report in self.reports}
        return tuple(rank for rank in self.living if rank not in said) if self.reports else ()

    def died(self, rank: int) -> tuple["Coordinator", Form | None]:
        """Raises RunFailed where too few are left."""
        left = len(self.living) - (rank in self.living)
        if left < self.at_least:
            raise RunFailed(
                f"{left} workers are left, and --elastic asks for {self.at_least} or more; start the run again, with a "
                "lower MIN if fewer may go on"
            )
        return self.ended(rank)

    def ended(self, rank: int) -> tuple["Coordinator", Form | None]:
        """This rank has come to its end, and takes no further step."""
        living = tuple(other for other in self.living if other != rank)
        reports = tuple(report for report in self.reports if report.rank != rank)
        return replace(self, living=living, reports=reports)._decided()

    def hear(self, report: Report) -> tuple["Coordinator", Form | None]:
        """
        Raises:
            StaleEpoch: the report is of another epoch, or of somebody who takes no part.
            RunFailed: members are at steps that do not fit.
        """
        if report.epoch != self.membership.epoch or report.rank not in self.living:
            raise StaleEpoch(
                f"refused rank {report.rank}'s report of epoch {report.epoch}; this is epoch {self.membership.epoch} "
                f"of ranks {self.living}"
            )
        others = tuple(other for other in self.reports if other.rank != report.rank)
        return replace(self, reports=(*others, report))._decided()

    def _decided(self) -> tuple["Coordinator", Form | None]:
        if not self.reports or len(self.reports) < len(self.living):
            return self, None
        membership = Membership(self.membership.epoch + 1, self.living)
        form = Form(membership, _step_of(self.reports))
        return Coordinator(membership, self.at_least, self.living), form


def _step_of(reports: tuple[Report, ...]) -> int:
    """Where all go on. A step that one has applied is committed, and so is one whose result all have."""
    step = min(report.applied + report.holds for report in reports)
    ahead = [report.rank for report in reports if report.applied > step]
    if ahead:
        raise RunFailed(f"ranks {ahead} have applied step {step + 1}, whose result others do not have")
    return step
