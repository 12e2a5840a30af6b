"""One member's half of the protocol: what it has of a step, and whether it may apply it."""

from dataclasses import dataclass, replace
from typing import final

from paceline.elastic.messages import Form, Report, StaleEpoch
from paceline.membership import Membership


@final
@dataclass(frozen=True)
class Member:
    """A value: each event makes the next one."""

    rank: int
    membership: Membership
    applied: int = 0
    """Steps that it has applied."""
    holds: bool = False
    """It has the whole result of the next step."""
    has_stopped: bool = False
    """It has lost sight of another member, and waits for the next epoch."""
    gives: tuple[int, ...] = ()
    """Ranks that it has given its state to. It gives its part of no further step in this epoch."""
    met: int = 0
    """Meetings between two steps that it has come out of. They end with all saying that they have all of it."""

    def with_result(self) -> "Member":
        """The result of the next step is whole here."""
        assert not self.has_stopped
        return replace(self, holds=True)

    def with_step_applied(self) -> "Member":
        """All of the epoch have the result, so that the step is committed."""
        assert self.holds
        assert not self.has_stopped
        return replace(self, applied=self.applied + 1, holds=False)

    def with_state_given(self, to: tuple[int, ...]) -> "Member":
        """These ranks can have the state that it has between two steps."""
        assert not self.holds
        return replace(self, gives=to)

    def state_taken(self, rank: int, *, before: "Member | None") -> "Member":
        """Whoever has taken this member's state waits for the next epoch with it. `before`: what it was after it had
        taken another, if it had. Raises StaleEpoch if that state is no older."""
        if before is not None and self.membership.epoch <= before.membership.epoch:
            raise StaleEpoch(f"rank {rank} has a state of epoch {before.membership.epoch} already")
        return Member(rank, self.membership, self.applied, has_stopped=True, met=self.met)

    def with_meeting_ended(self) -> "Member":
        """All have all of it."""
        return replace(self, met=self.met + 1)

    def stopped(self) -> "Member":
        """Another member is lost, or does not answer. Nothing is applied until the next epoch."""
        return replace(self, has_stopped=True)

    def with_result_handed_on(self, step: int) -> "Member":
        """It has stopped, and applies a step whose result another member has handed on to it. Raises StaleEpoch for
        another step than its next one."""
        assert self.has_stopped
        if step != self.applied + 1:
            raise StaleEpoch(f"rank {self.rank} has applied {self.applied} steps, and was handed step {step}")
        return replace(self, applied=step, holds=False)

    def report(self) -> Report:
        """What the coordinator is told, who has the next epoch begin."""
        assert self.has_stopped
        return Report(self.membership.epoch, self.rank, self.applied, self.holds, self.gives, self.met)

    def formed(self, form: Form) -> tuple["Member", bool]:
        """The next epoch, and whether the step is applied whose result is held. Otherwise it is repeated.

        Raises:
            StaleEpoch: the word is not of a later epoch, or of one without this member.
        """
        if form.membership.epoch <= self.membership.epoch or self.rank not in form.membership.ranks:
            raise StaleEpoch(
                f"rank {self.rank} of epoch {self.membership.epoch} refused to join epoch {form.membership.epoch} of "
                f"ranks {form.membership.ranks}"
            )
        assert form.step in (self.applied, self.applied + self.holds)
        return Member(self.rank, form.membership, form.step, met=form.met), form.step > self.applied
