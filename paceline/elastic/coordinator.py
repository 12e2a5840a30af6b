"""The coordinator's half of the protocol: who is left, who comes, and from which step they go on."""

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

    Over messages one member may have applied a step whose result another lacks. Then it hands the result on (`ahead`,
    `behind`), and the next epoch begins when those have applied the step, too, and said so (`handed_on`).

    Who joins is ready (`joined`), takes a member's state, and says so. That member gives its part of no further step,
    so that the epoch ends before the state is old, and names the joiner in its own report.
    """

    membership: Membership
    """Of the present epoch, with those who have died in it."""
    at_least: int = 1
    living: tuple[int, ...] = ()
    reports: tuple[Report, ...] = ()
    """Of the living, and of joiners that have taken a state, in this epoch."""
    joining: tuple[int, ...] = ()
    """Ready to take a state."""

    @classmethod
    def first(cls, membership: Membership, *, at_least: int = 1) -> "Coordinator":
        return cls(membership, at_least, membership.ranks)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The living who have not stopped, while others wait for the next epoch."""
        said = {report.rank for report in self.reports}
        return tuple(rank for rank in (*self.living, *self._given) if rank not in said) if self._stopped else ()

    @property
    def giver(self) -> int | None:
        """Who gives a state to those who are joining; nobody where nobody waits for one."""
        return self.living[0] if self.joining and self.living else None

    @property
    def ahead(self) -> int | None:
        """Who has applied a step that others lack, once all have stopped."""
        return None if self.awaited or not self.behind else max(self._stopped, key=lambda report: report.applied).rank

    @property
    def behind(self) -> tuple[int, ...]:
        """Who lacks a step that another has applied."""
        return tuple(report.rank for report in self._stopped if report.applied + report.holds < self._furthest)

    def handed_on(self, *, epoch: int, step: int) -> tuple["Coordinator", tuple[int, ...]]:
        """Who is ahead has handed on this step's result. Returns who is told of it: they stop again when they have
        applied it."""
        told = self.behind if (epoch, step) == (self.membership.epoch, self._furthest) else ()
        return replace(self, reports=tuple(report for report in self.reports if report.rank not in told)), told

    def joined(self, rank: int) -> "Coordinator":
        """This rank, which has taken no part so far, is ready to take a state."""
        return self if rank in self.joining else replace(self, joining=(*self.joining, rank))

    def entered(self, report: Report) -> "Coordinator":
        """Where no step needs all, whoever joins takes part as soon as it has a state: the next epoch begins when it
        has stopped, too. Raises StaleEpoch if others may have met since they gave that state."""
        self._require_of_epoch(report, (*self.joining,))
        joining = tuple(other for other in self.joining if other != report.rank)
        return replace(self, living=(*self.living, report.rank), joining=joining)

    def died(self, rank: int) -> tuple["Coordinator", Form | None]:
        """This rank takes no further step, and had not come to its end. Raises RunFailed where too few are left."""
        left = len(self.living) - (rank in self.living)
        if left < self.at_least:
            raise RunFailed(
                f"{left} workers are left, and --elastic asks for {self.at_least} or more; start the run again, with a "
                "lower MIN if fewer may go on"
            )
        return self.ended(rank)

    def ended(self, rank: int) -> tuple["Coordinator", Form | None]:
        """This rank has come to its end, and takes no further step; or it does not join any more."""
        living, joining = (tuple(other for other in ranks if other != rank) for ranks in (self.living, self.joining))
        reports = tuple(report for report in self.reports if report.rank != rank)
        return replace(self, living=living, joining=joining, reports=reports)._decided()

    def hear(self, report: Report) -> tuple["Coordinator", Form | None]:
        """
        Raises:
            StaleEpoch: the report is of another epoch, or of somebody who takes no part.
            RunFailed: a member lacks more than one step.
        """
        self._require_of_epoch(report, (*self.living, *self.joining))
        others = tuple(other for other in self.reports if other.rank != report.rank)
        for other in others:
            if abs(other.applied - report.applied) > 1 and {other.rank, report.rank} <= {*self.living}:
                raise RunFailed(
                    f"ranks {other.rank} and {report.rank} are {other.applied} and {report.applied} steps far"
                )
        return replace(self, reports=(*others, report))._decided()

    def _require_of_epoch(self, report: Report, ranks: tuple[int, ...]) -> None:
        """Raises StaleEpoch if it is of another epoch, or of none of these."""
        if report.epoch != self.membership.epoch or report.rank not in ranks:
            raise StaleEpoch(
                f"refused rank {report.rank}'s report of epoch {report.epoch}; this is epoch {self.membership.epoch} "
                f"of ranks {self.living}"
            )

    @property
    def _stopped(self) -> tuple[Report, ...]:
        return tuple(report for report in self.reports if report.rank in self.living)

    @property
    def _furthest(self) -> int:
        return max((report.applied for report in self._stopped), default=0)

    @property
    def _given(self) -> set[int]:
        """Those joining to whom a member has given its state."""
        return {rank for report in self._stopped for rank in report.gives} & set(self.joining)

    def _decided(self) -> tuple["Coordinator", Form | None]:
        stopped, given = self._stopped, self._given
        if not stopped or self.awaited or self.behind:
            return self, None
        step = _step_of(stopped)
        # A state whose giver has died is left, since nobody knows what it was given for.
        entering = tuple(rank for rank in given if (rank, step) in {(each.rank, each.applied) for each in self.reports})
        ranks = tuple(sorted((*self.living, *entering)))
        membership = Membership(self.membership.epoch + 1, ranks)
        joining = tuple(rank for rank in self.joining if rank not in entering)
        met = max(report.met for report in stopped)
        return Coordinator(membership, self.at_least, ranks, joining=joining), Form(membership, step, met)


def _step_of(reports: tuple[Report, ...]) -> int:
    """Where all go on. A step that one has applied is committed, and so is one whose result all have."""
    return min(report.applied + report.holds for report in reports)
