"""A worker in whose world others come, leave and die: it tells the launcher, hears who goes on, and meets them."""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.comm.shared_memory.descriptors import open_descriptor
from paceline.elastic import Form, Member, Report, StaleEpoch
from paceline.engines.ray.control import ControlLine
from paceline.errors import BudgetReached, PeerLost
from paceline.membership import Membership
from paceline.messages import Kind
from paceline.strategies.regrouping import Formed


@final
class Reforming:
    """Makes a new collective for each epoch; this process, its model and its data stay as they are.

    Args:
        collective: the present epoch's.
        add: told of each new one, which an abort has to reach.
        joins: this worker takes no part yet.
    """

    def __init__(
        self,
        line: ControlLine,
        collective: Collective,
        *,
        deadline_s: float | None,
        add: Callable[[Collective], None],
        joins: bool = False,
    ) -> None:
        self._line, self._collective, self._deadline_s, self._add = line, collective, deadline_s, add
        self.joins = joins
        self._descriptors: list[int] = []  # of states under way, until the others have gone on

    @property
    def asked_to_give(self) -> tuple[int, ...]:
        return self._line.asked_to_give

    @property
    def is_asked_to_leave(self) -> bool:
        return self._line.is_asked_to_leave

    def give(self, write: Callable[[Path], None], *, member: Member, to: tuple[int, ...]) -> None:
        """The file has no name: it goes when nobody has it open."""
        self._line.asked_to_give = ()
        name = f"paceline-{secrets.randbits(63):016x}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        write(Path(f"/proc/self/fd/{descriptor}"))
        state = {"pid": os.getpid(), "fd": descriptor, "name": name}
        self._line.tell(Kind.GIFT, {"rank": member.rank, "to": list(to), "state": state})

    def take(self, *, rank: int, epoch: int) -> int | Path:
        """Raises BudgetReached if the run has ended."""
        while True:
            said = self._heard(Kind.TAKE, {"rank": rank, "epoch": epoch})
            if "state" not in said:
                return int(said["epoch"])
            state = said["state"]
            try:
                link = f"/memfd:{state['name']} (deleted)"
                descriptor = open_descriptor(state["pid"], state["fd"], link=link, flags=os.O_RDONLY)
            except PeerLost:  # whoever gave it has died
                continue
            self._descriptors.append(descriptor)
            return Path(f"/proc/self/fd/{descriptor}")

    def leave(self, rank: int) -> None:
        self._line.tell(Kind.RETIRED, {"rank": rank})
        self._collective.close()

    def __call__(self, member: Member) -> Formed:
        """Those who are left, and what connects them. Collective call of these. Raises Aborted if the run ends."""
        timing, applies = self._collective.timing, False
        while True:
            self._collective.close()
            memory = SharedMemoryCollective.prepare()
            member = member.stopped()
            form, addresses = self._told(member, memory.address)
            while self._descriptors:
                os.close(self._descriptors.pop())
            self.joins = False
            member, applies_now = member.formed(form)
            applies = applies or applies_now
            ranks = form.membership.ranks
            if len(ranks) == 1:
                memory.close()
                self._collective = AloneCollective(timing=timing)
            else:
                try:
                    self._collective = SharedMemoryCollective(
                        rank=ranks.index(member.rank),
                        addresses=[addresses[rank] for rank in ranks],
                        control=memory,
                        deadline_s=self._deadline_s,
                        timing=timing,
                        names=ranks,
                    )
                except PeerLost:  # one more
                    memory.close()
                    continue
            self._add(self._collective)
            return Formed(member, self._collective, applies)

    def _told(self, member: Member, memory: BlockAddress) -> tuple[Form, dict[int, BlockAddress]]:
        said = self._heard(Kind.REPORT, {**asdict(member.report()), "memory": asdict(memory)})
        if "again" in said:
            raise StaleEpoch(f"the others have gone on without rank {member.rank}")
        form = form_of(said)
        if form.membership.epoch <= member.membership.epoch:
            raise StaleEpoch(f"rank {member.rank} heard of epoch {form.membership.epoch} again")
        return form, {int(rank): BlockAddress(**address) for rank, address in said["memories"].items()}

    def _heard(self, kind: Kind, body: Mapping[str, Any]) -> Mapping[str, Any]:
        said = self._line.ask(kind, body)
        if "over" in said:
            raise BudgetReached("the run has ended")
        return said


def form_of(body: Mapping[str, Any]) -> Form:
    return Form(Membership(body["epoch"], tuple(body["ranks"])), body["step"])


def report_of(body: Mapping[str, Any]) -> Report:
    return Report(body["epoch"], body["rank"], body["applied"], body["holds"], tuple(body["gives"]))
