"""A worker whose world has lost somebody: it tells the launcher, hears who is left, and meets them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, final

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.elastic import Form, Member, Report, StaleEpoch
from paceline.engines.ray.control import ControlLine
from paceline.errors import PeerLost
from paceline.membership import Membership
from paceline.strategies.base import Formed


@final
class Reforming:
    """Makes a new collective for each epoch; this process, its model and its data stay as they are.

    Args:
        collective: the present epoch's.
        add: told of each new one, which an abort has to reach.
    """

    def __init__(
        self,
        line: ControlLine,
        collective: Collective,
        *,
        deadline_s: float | None,
        add: Callable[[Collective], None],
    ) -> None:
        self._line, self._collective, self._deadline_s, self._add = line, collective, deadline_s, add

    def __call__(self, member: Member) -> Formed:
        """Those who are left, and what connects them. Collective call of these. Raises Aborted if the run ends."""
        timing, applies = self._collective.timing, False
        while True:
            self._collective.close()
            memory = SharedMemoryCollective.prepare()
            member = member.stopped()
            form, addresses = self._told(member, memory.address)
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
        said = self._line.report({**asdict(member.report()), "memory": asdict(memory)})
        form = form_of(said)
        if form.membership.epoch <= member.membership.epoch:
            raise StaleEpoch(f"rank {member.rank} heard of epoch {form.membership.epoch} again")
        return form, {int(rank): BlockAddress(**address) for rank, address in said["memories"].items()}


def form_of(body: Mapping[str, Any]) -> Form:
    return Form(Membership(body["epoch"], tuple(body["ranks"])), body["step"])


def report_of(body: Mapping[str, Any]) -> Report:
    return Report(*(body[name] for name in ("epoch", "rank", "applied", "holds")))
