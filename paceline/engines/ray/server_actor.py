"""A parameter server of a run, as a Ray actor, and how workers have servers built."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import ray
import torch

from paceline.comm.servers.service import ParameterService
from paceline.engines import striking
from paceline.engines.ray.control import ControlLine, LauncherAddress
from paceline.engines.ray.liveness import end_this_process
from paceline.engines.ray.nodes import own_address, own_node_id
from paceline.engines.ray.world_spec import ServerInfo, WorldSpec
from paceline.engines.scripting import Outcome, outcome_of
from paceline.late_compiler import load_compiler_late
from paceline.layout import Layout
from paceline.messages import Kind, Message
from paceline.server.admission import Decisions
from paceline.server.chains import Chain, to_body
from paceline.server.ranges import KeyRange
from paceline.server.replication import Copied, HandedOver
from paceline.server.spec import OptimizerSpec, ServerSpec
from paceline.server.whole_pushes import Parted


@final
class ServerActor:
    """One parameter server. `serve` runs in one thread until `stop`, called in another."""

    def __init__(self, launcher: LauncherAddress, index: int) -> None:
        torch.set_num_threads(1)
        load_compiler_late()
        striking.arm_server(index)
        self._service: ParameterService | None = None
        self._line = ControlLine(
            launcher,
            identity=f"server-{index}",
            progress=self._iteration,
            on_abort=self._abort,
            on_chain=self._reform,
            on_lease_ended=end_this_process,
        )
        self._service = ParameterService(
            launcher.keys,
            host=own_address(),
            index=index,
            epoch=launcher.epoch,
            reporter=self._line,
            on_serving=lambda chain: self._line.tell(Kind.SERVES, to_body(chain)),
            on_told=self._tell,
        )

    def hello(self) -> ServerInfo:
        return ServerInfo(os.getpid(), own_node_id(), self._built.endpoint, self._built.bell)

    def configure(self, spec: ServerSpec) -> None:
        self._built.configure(spec)

    def replicate(self, spec: ServerSpec, chain: Chain, endpoints: dict[int, str]) -> None:
        self._built.replicate(spec, chain, endpoints=endpoints)

    def replicate_anew(self, spec: ServerSpec, chain: Chain, endpoints: dict[int, str]) -> None:
        """Have the service build what is to become a copy, as this server is the chain's newcomer."""
        self._built.replicate_anew(spec, chain, endpoints=endpoints)

    def spec_of(self, key_range: int) -> ServerSpec:
        """Return what another server builds a copy of this key range by."""
        return self._built.spec_of(key_range)

    def serve(self) -> Outcome:
        try:
            self._built.serve()
            return Outcome(num_steps=self._iteration())
        except BaseException as error:
            return outcome_of(error, num_steps=self._iteration())
        finally:
            self._line.close()

    def part_with(self, key_range: int, worker: int) -> Parted:
        """As `ParameterService.part_with`."""
        return self._built.part_with(key_range, worker)

    def let_go(self, key_range: int, worker: int, counts: Message | None, decided: Decisions) -> Decisions:
        """As `ParameterService.let_go`."""
        return self._built.let_go(key_range, worker, counts, decided)

    def expect(self, key_range: int, worker: int) -> int:
        """As `ParameterService.expect`."""
        return self._built.expect(key_range, worker)

    def let_in(self, key_range: int, worker: int, clock: int) -> None:
        """As `ParameterService.let_in`."""
        self._built.let_in(key_range, worker, clock)

    def stop(self) -> None:
        self._built.stop()

    @property
    def _built(self) -> ParameterService:
        assert self._service is not None
        return self._service

    def _iteration(self) -> int:
        """The service's iteration, if there is a service: the control line asks from its start, which is before
        that."""
        return self._service.iteration if self._service is not None else 0

    def _reform(self, chain: Chain, joined: Mapping[int, ServerInfo]) -> None:
        self._built.reform(chain, endpoints={server: info.endpoint for server, info in joined.items()})

    def _tell(self, told: Copied | HandedOver) -> None:
        kind = Kind.COPIED if isinstance(told, Copied) else Kind.HANDED_OVER
        self._line.tell(kind, {**to_body(told.chain), "why_not": told.why_not})

    def _abort(self, reason: str) -> None:
        if self._service is not None:
            self._service.stop()


def configure(
    spec: WorldSpec,
    servers: list[Any],
    number: int,
    layout: Layout,
    optimizer: OptimizerSpec,
    ranges: Sequence[KeyRange],
) -> None:
    """Have every server build its shards for the optimizer of this number. Set-up goes through Ray, which can carry a
    script's own optimizer class."""
    specs = [
        spec.strategy.server_spec(
            layout, pieces, optimizer, members=spec.membership, max_updates=spec.config.max_steps, number=number
        )
        for pieces in ranges
    ]
    if spec.config.elastic is not None:
        is_copied_apart = spec.chains is not None and len({server.node_id for server in spec.servers}) > 1
        specs = [replace(each, outlives_workers=True, is_copied_apart=is_copied_apart) for each in specs]
    if spec.chains is None:
        ray.get([server.configure.remote(own) for server, own in zip(servers, specs, strict=True)])
        return
    endpoints = {index: server.endpoint for index, server in enumerate(spec.servers)}
    ray.get(
        [
            servers[server].replicate.remote(specs[chain.key_range], chain, endpoints)
            for chain in spec.chains.chains
            for server in chain.servers
        ]
    )
