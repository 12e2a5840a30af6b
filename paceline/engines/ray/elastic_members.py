"""The members of an elastic run: they die, leave and join, and the others go on."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, final

import ray

from paceline.elastic import Elastic
from paceline.engines.ray.answers import Answers
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.hearing import Hearing
from paceline.engines.ray.job import Job
from paceline.engines.ray.lane_desk import LaneDesk
from paceline.engines.ray.letting_go import LettingGo
from paceline.engines.ray.liveness import Watch
from paceline.engines.ray.members import Members
from paceline.engines.ray.new_servers import NewServers
from paceline.engines.ray.newcomers import Newcomers
from paceline.engines.ray.nodes import own_node_id
from paceline.engines.ray.survival import Survival
from paceline.engines.ray.takeover import Takeover
from paceline.engines.ray.world_spec import WorkerInfo, WorldSpec
from paceline.errors import UsageError
from paceline.strategies.traits import Traits

_WORD_S = 5.0  # how long it may take until it is clear that a run has begun, when somebody dies early


@final
class ElasticMembers:
    """
    Args:
        traits: of the strategy in an elastic run.
        program: what workers that come are to run.
        answers: where more workers and servers are asked for.
        takeover: has other servers take the place of dead ones; none: there are no copies of key ranges.
        say: shows a line where the run was started.
    """

    def __init__(
        self,
        elastic: Elastic,
        job: Job,
        traits: Traits,
        *,
        spec: WorldSpec,
        program: ray.ObjectRef[Any],
        controller: Controller,
        members: Members,
        watch: Watch,
        hearing: Hearing,
        answers: Answers,
        takeover: Takeover | None,
        say: Callable[[str], None],
    ) -> None:
        self._controller, self._members, self._hearing, self._takeover = controller, members, hearing, takeover
        self._lane_desk = LaneDesk(controller, num_workers=spec.size, say=say) if traits.has_lanes else None
        self._ended: set[str] = set()
        """Workers that have come to their end, as the others know."""
        letting_go = None
        if self._lane_desk is not None and traits.outlives_workers:
            letting_go = LettingGo(
                controller,
                members,
                self._lane_desk,
                num_ranges=len(spec.servers) if spec.chains is None else len(spec.chains.chains),
                takeover=takeover,
                deadline_s=elastic.deadline_s,
                turn=self._look_after_members,
            )
        elsewhere = {
            name
            for name, info in members.infos.items()
            if info.node_id != own_node_id() and (isinstance(info, WorkerInfo) or spec.chains is not None)
        }
        self._survival = Survival(
            elastic,
            controller,
            membership=spec.membership,
            # Under servers the others may have many steps to go to where they meet; the supervisor watches their steps.
            deadline_s=math.inf if letting_go is not None else job.config.deadline_s,
            pids={name: info.pid for name, info in members.infos.items()},
            elsewhere=elsewhere,
            desk=self._lane_desk,
            letting_go=letting_go,
            servers=tuple if takeover is None else lambda: members.servers.keys() & members.infos.keys(),
            say=say,
        )
        self._newcomers = Newcomers(
            elastic,
            self._survival,
            controller,
            members,
            watch,
            spec=spec,
            program=program,
            environment=job.environment,
            takeover=takeover,
            say=say,
        )
        self._new_servers: NewServers | None = None
        if takeover is not None:
            self._new_servers = NewServers(
                controller,
                members,
                watch,
                self._survival,
                takeover,
                environment=job.environment,
                replacements=elastic.replacements,
                within_s=job.config.start_deadline_s,
                say=say,
            )
        try:
            answers.scale_by(self._newcomers, self._new_servers)
        except UsageError as refused:
            say(str(refused))

    def survive(self) -> None:
        """Workers that have died are no members any more, and the others go on.

        Raises:
            RunFailed: too few workers are left.
        """
        members, survival, newcomers = self._members, self._survival, self._newcomers
        self._expel()
        newcomers.turn()
        for name, outcome in members.outcomes.items():
            if outcome.error is None and name not in self._ended:
                self._ended.add(name)
                survival.end(name)
        survival.hear()
        if members.dead and not survival.has_begun:
            # Word of the first step may still be under way; others who have taken it say so when they miss the dead.
            self._hearing.gather(lambda: survival.has_begun or members.has_error, limit_s=_WORD_S)
            if not survival.has_begun:
                return
        # Servers' deaths end the run, or others take over, elsewhere.
        for name in sorted(members.dead - members.servers.keys()):
            if name in self._controller.gone | survival.left:
                survival.end(name)
            else:
                survival.lose(name)
            members.forget(name)
            self._controller.forget(name)
            newcomers.replace_lost()
        if not survival.ranks:
            newcomers.give_up_all()
        survival.end_silent()
        survival.require_all()

    def turn_new_servers(self) -> None:
        """Have servers that are to come go on with that."""
        if self._new_servers is not None:
            self._new_servers.turn()

    def why(self, name: str) -> str:
        """Say what ended its process, as far as the launcher knows."""
        return self._survival.why(name)

    def give_up_newcomers(self) -> None:
        """No worker and no server comes any more."""
        self._newcomers.give_up_all()
        self.give_up_new_servers()

    def give_up_new_servers(self) -> None:
        if self._new_servers is not None:
            self._new_servers.give_up_all()

    def end(self) -> None:
        """The run has ended well."""
        if self._lane_desk is not None:
            self._lane_desk.end()

    def _expel(self) -> None:
        """Who is expelled has died for all others."""
        members = self._members
        for name in self._controller.expelled & members.actors.keys():
            with contextlib.suppress(Exception):
                ray.kill(members.actors[name])
            members.dead.add(name)

    def _look_after_members(self, timeout_s: float) -> None:
        """Hear members in the middle of a turn: whoever waits for servers goes on when others have taken over."""
        self._controller.turn(timeout_s=timeout_s)  # commands wait for the whole turn
        self._hearing.collect()
        self._survival.end_silent()
        self._expel()
        if self._takeover is not None:
            self._takeover.turn(self._members)
