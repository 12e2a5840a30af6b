"""A worker in whose world others come, leave and die: it tells the launcher, hears who goes on, and meets them."""

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, final

from torch.distributed import PrefixStore, Store

from paceline.comm.attempt import attempt
from paceline.comm.base import Collective, Timing
from paceline.comm.connecting import Site, connect_members, needs_store, site_of
from paceline.comm.file_sockets import OfferedFile, copy_file
from paceline.comm.shared_memory.block import SharedBlock
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.comm.shared_memory.descriptors import open_descriptor
from paceline.comm.socket_mailbox import SocketMailbox
from paceline.elastic import Done, Form, Lane, LaneBatch, Member, Report, StaleEpoch
from paceline.engines.ray.control import ControlLine, LauncherAddress
from paceline.errors import DeadlineExceeded, PeerLost
from paceline.membership import Membership
from paceline.messages import Kind, Raw, raw_bytes
from paceline.strategies.regrouping import Formed, ResultHandedOn

_AGAIN_S, _MOST_COPIES = 0.5, 3
"""Time between two tries to take a worker's state, and how many of the same state there are."""


@final
class Reforming:
    """Makes a new collective for each epoch; this process, its model and its data stay as they are.

    Args:
        collective: the present epoch's.
        rank: this worker's, in the launcher's words.
        launcher: whose keys a state is given with to another host.
        host: the same for exactly those workers that can share memory.
        address: at which other hosts reach this one.
        store: where workers of several hosts meet.
        meet_within_s: who has not come to a meeting of hosts by then is looked for.
        add: told of each new one, which an abort has to reach.
        joins: this worker takes no part yet.
    """

    def __init__(
        self,
        line: ControlLine,
        collective: Collective,
        launcher: LauncherAddress,
        *,
        rank: int,
        host: str,
        address: str,
        store: Store,
        deadline_s: float | None,
        meet_within_s: float,
        add: Callable[[Collective], None],
        joins: bool = False,
    ) -> None:
        self._line, self._collective, self._deadline_s, self._add = line, collective, deadline_s, add
        self._rank = rank
        self._host, self._address, self._store, self._meet_within_s = host, address, store, meet_within_s
        self._keys, self._run_epoch = launcher.keys, launcher.epoch
        self._epoch, self._lost_epoch = 0, 0
        self._gone: Sequence[int] = ()  # of that one
        self._mailbox: tuple[SocketMailbox, Membership] | None = None  # of an epoch
        line.on_lost = self._lose
        self.joins = joins
        self._states = ExitStack()  # under way, until the others have gone on

    def begin(self, rank: int, *, epoch: int) -> Lane | None:
        said = self._line.ask(Kind.LANE, {"rank": rank, "begins": epoch})
        return None if said["lane"] is None else Lane(*said["lane"])

    def next_left_over(self, rank: int, *, epoch: int, none: LaneBatch | None = None) -> LaneBatch | None:
        said = self._line.ask(Kind.LANE, {"rank": rank, "ended": epoch, "none": none})
        return None if said["batch"] is None else LaneBatch(*said["batch"])

    def give_back(self, rank: int, rest: LaneBatch) -> None:
        self._line.tell(Kind.LANE, {"rank": rank, "gives_back": rest})

    def gone(self, rank: int, done: Done) -> None:
        self._line.tell(Kind.LANE, {"rank": self._rank, "gone": rank, "done": done})

    def enter(self, member: Member) -> Membership:
        said = self._line.ask(Kind.REPORT, {**asdict(member.report()), "site": None})
        if "again" in said:
            raise StaleEpoch(f"the others have met without rank {member.rank}")
        self._states.close()
        self.joins = False
        return Membership(said["epoch"], tuple(said["ranks"]))

    def lanes(self) -> Mapping[str, Any]:
        said: Mapping[str, Any] = self._line.ask(Kind.LANE, {"rank": self._rank, "resumes": None})["lanes"]
        return said

    def resume(self, lanes: Mapping[str, Any]) -> None:
        self._line.ask(Kind.LANE, {"rank": self._rank, "resumes": lanes})

    @property
    def asked_to_give(self) -> tuple[int, ...]:
        return self._line.asked_to_give

    @property
    def is_asked_to_leave(self) -> bool:
        return self._line.is_asked_to_leave

    def give(self, write: Callable[[Path], None], *, member: Member, to: tuple[int, ...]) -> None:
        """The file has no name: it goes when nobody has it open."""
        if self._line.asked_to_give == to:  # else somebody else has come since
            self._line.asked_to_give = ()
        name = f"paceline-{secrets.randbits(63):016x}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._states.callback(os.close, descriptor)
        write(Path(f"/proc/self/fd/{descriptor}"))
        state = {"giver": member.rank, "host": self._host, "pid": os.getpid(), "fd": descriptor, "name": name}
        if self._line.gives_to_other_hosts:
            offered = OfferedFile(descriptor, self._keys, host=self._address, epoch=self._run_epoch)
            self._states.callback(offered.withdraw)
            state |= {"endpoint": offered.endpoint, "num_bytes": os.fstat(descriptor).st_size}
        self._line.tell(Kind.GIFT, {"rank": member.rank, "to": list(to), "state": state})

    def take(self, *, rank: int, epoch: int) -> int | Path:
        """Raises BudgetReached if the run has ended, and PeerLost if a state cannot be had of a worker that lives."""
        num_failures: Counter[str] = Counter()
        while True:
            said = self._line.ask(Kind.TAKE, {"rank": rank, "epoch": epoch})
            if "state" not in said:
                return int(said["epoch"])
            try:
                return Path(f"/proc/self/fd/{self._opened(said['state'], rank=rank)}")
            except PeerLost:  # whoever gave it has died, as a rule: the launcher knows in a moment
                num_failures[said["state"]["name"]] += 1
                if num_failures[said["state"]["name"]] == _MOST_COPIES:
                    raise
                time.sleep(_AGAIN_S)

    def _opened(self, state: Mapping[str, Any], *, rank: int) -> int:
        """A descriptor of the state itself, or of a copy of one that is on another host. Raises PeerLost."""
        if state["host"] == self._host:
            link = f"/memfd:{state['name']} (deleted)"
            descriptor = open_descriptor(state["pid"], state["fd"], link=link, flags=os.O_RDONLY)
            self._states.callback(os.close, descriptor)
            return descriptor
        with ExitStack() as until_whole:
            descriptor = os.memfd_create(state["name"], os.MFD_CLOEXEC)
            until_whole.callback(os.close, descriptor)
            copy_file(
                descriptor,
                self._keys,
                endpoint=state["endpoint"],
                num_bytes=state["num_bytes"],
                identity=f"joiner-{rank}",
                epoch=self._run_epoch,
                patience_s=self._meet_within_s,
            )
            self._states.push(until_whole.pop_all())
        return descriptor

    def leave(self, rank: int) -> None:
        self._line.tell(Kind.RETIRED, {"rank": rank})
        self._collective.close()

    def __call__(self, member: Member, last_result: Callable[[], Sequence[Raw]]) -> Formed:
        """Those who are left, and what connects them. Collective call of these. Raises Aborted if the run ends."""
        timing = self._collective.timing
        while True:
            self._collective.lose("its workers meet anew")  # whoever uses it yet regroups
            self._collective.close()
            memory = SharedMemoryCollective.prepare()
            member = member.stopped()
            form, sites = self._told(member, Site(self._host, None, memory.address), last_result)
            self._states.close()
            self.joins = False
            member, _ = member.formed(form)
            self._epoch = form.membership.epoch
            try:
                self._collective = self._connected(member, sites, memory, timing)
            except (PeerLost, DeadlineExceeded):  # one more
                continue
            self._add(self._collective)
            if self._lost_epoch >= self._epoch:
                self._lose(self._lost_epoch, self._gone)
            beside = [rank for rank, site in sites.items() if site.host == self._host]
            return Formed(member, self._collective, beside.index(member.rank), len(beside))

    def _connected(self, member: Member, sites: Mapping[int, Site], memory: SharedBlock, timing: Timing) -> Collective:
        members, ranks = list(sites.values()), member.membership.ranks
        meets_hosts = needs_store(members)
        meet = partial(
            connect_members,
            members,
            rank=ranks.index(member.rank),
            memory=memory,
            deadline_s=self._meet_within_s if meets_hosts else self._deadline_s,
            store=PrefixStore(f"epoch-{member.membership.epoch}", self._store),
            address=self._address,
            timing=timing,
            names=ranks,
        )
        if not meets_hosts:  # on one host ends are noticed at once
            return meet()
        collective = attempt(meet, check=self._require_meeting, drop=lambda late: late.close())
        collective.set_deadline(self._deadline_s)
        return collective

    def _require_meeting(self) -> None:
        """Raises PeerLost if not all of the epoch come that this worker meets, and Aborted if the run ends."""
        self._line.check()
        if self._lost_epoch >= self._epoch:
            raise PeerLost("others of this epoch are gone, or meet anew, as the launcher says")

    def watch(self, mailbox: SocketMailbox, membership: Membership) -> None:
        """Have it end with this epoch."""
        self._mailbox = mailbox, membership
        self._end_mailbox()

    def _lose(self, epoch: int, gone: Sequence[int]) -> None:
        """These of this epoch are gone. Callable from any thread."""
        if epoch >= self._lost_epoch:
            self._lost_epoch, self._gone = epoch, gone
        self._end_mailbox()
        if epoch >= self._epoch:
            self._collective.lose("a worker is gone, as the launcher says")

    def _end_mailbox(self) -> None:
        if self._mailbox is None:
            return
        mailbox, membership = self._mailbox
        if self._lost_epoch == membership.epoch:
            mailbox.end([place for place, rank in enumerate(membership.ranks) if rank in self._gone])

    def _told(
        self, member: Member, site: Site, last_result: Callable[[], Sequence[Raw]]
    ) -> tuple[Form, dict[int, Site]]:
        said = self._line.ask(Kind.REPORT, {**asdict(member.report()), "site": asdict(site)})
        while True:
            if "hand" in said:
                result = {"rank": member.rank, "epoch": member.membership.epoch, "step": member.applied}
                # Later steps write over the result, which may have to be sent again.
                copies = [bytes(raw_bytes(frame)) for frame in last_result()]
                said = self._line.ask(Kind.RESULT, result, copies)
            elif "result" in said:
                member.with_result_handed_on(said["result"])
                raise ResultHandedOn(said["payload"])
            else:
                break
        if "again" in said:
            raise StaleEpoch(f"the others have gone on without rank {member.rank}")
        form = form_of(said)
        if form.membership.epoch <= member.membership.epoch:
            raise StaleEpoch(f"rank {member.rank} heard of epoch {form.membership.epoch} again")
        return form, {rank: site_of(said["sites"][str(rank)]) for rank in form.membership.ranks}


def form_of(body: Mapping[str, Any]) -> Form:
    return Form(Membership(body["epoch"], tuple(body["ranks"])), body["step"], body["met"])


def report_of(body: Mapping[str, Any]) -> Report:
    return Report(body["epoch"], body["rank"], body["applied"], body["holds"], tuple(body["gives"]), body["met"])
