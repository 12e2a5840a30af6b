"""The workers of one call of an elastic job on Ray: actors that come and go with the cluster's hosts."""

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import ray

from paceline.horovod.elastic_jobs.loop import Loop
from paceline.horovod.ray.worker import BaseHorovodWorker
from paceline.records import EventRecord
from paceline.running.launched import LaunchedRun

_SHARE_OF_NODE = 0.01  # of the resource that Ray gives each host's name, so that workers are placed there
_CALLS_AT_A_TIME = 4


@final
@dataclass(frozen=True)
class Making:
    """How workers are made.

    Args:
        num_cpus, num_gpus: what Ray is to set aside for each.
        executable: class, arguments and keyword arguments of each worker's object.
    """

    num_cpus: float
    num_gpus: int
    executable: tuple[Any, ...]
    variables: Mapping[str, Any]


@final
class ActorFleet:
    """Calls a function on every worker; its results, and who is there. `loop` is to be set before anybody starts."""

    loop: Loop

    def __init__(self, making: Making, function: Callable[[Any], Any], queue: Any, recorded: LaunchedRun) -> None:
        self._making, self._function, self._queue, self._recorded = making, function, queue, recorded
        self.actors: dict[int, Any] = {}
        self.hosts: dict[int, str] = {}
        self.results: dict[int, Any] = {}
        self.slots: Mapping[str, int] = {}
        """By host, as they were found last."""

    def start(self, worker: int, host: str) -> None:
        actor = ray.remote(BaseHorovodWorker).options(
            num_cpus=self._making.num_cpus,
            num_gpus=self._making.num_gpus,
            resources={f"node:{host}": _SHARE_OF_NODE},
            max_concurrency=_CALLS_AT_A_TIME,  # it hears of changes while it works
        ).remote(world_rank=worker)  # fmt: skip
        self.actors[worker], self.hosts[worker] = actor, host
        variables = {"HOROVOD_HOSTNAME": host, **self._gpus(host), **self._making.variables}
        threading.Thread(target=self._follow, args=(worker, actor, host, variables), daemon=True).start()

    def stop(self, worker: int) -> None:
        self.hosts.pop(worker, None)
        actor = self.actors.pop(worker, None)
        if actor is not None:
            ray.kill(actor)

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        actor = self.actors.get(worker)
        if actor is not None:  # else it has just failed
            actor.hear.remote(message)

    def note(self, event: EventRecord) -> None:
        self._recorded.note(event)

    def close(self) -> None:
        for worker in [*self.actors]:
            self.stop(worker)

    def _follow(self, worker: int, actor: Any, host: str, variables: Mapping[str, Any]) -> None:
        status = 0
        try:
            ray.get(actor.update_env_vars.remote(variables))
            ray.get([actor.start_executable.remote(*self._making.executable), actor.set_queue.remote(self._queue)])
            result = actor.work.remote(self._function)
            while (said := ray.get(actor.message.remote()))["kind"] != "over":
                if said["kind"] == "ask":
                    self.loop.asked(worker, said["mine"])
                else:
                    self._recorded.keep(worker - 1, said["records"])
            self.results[worker] = ray.get(result)
        except Exception as error:
            status = 1
            if worker in self.actors:  # it was not to end
                print(f"worker {worker} on {host}: {error}", file=sys.stderr)
            self.stop(worker)  # Ray has room for another only once the actor is gone
        finally:
            self.loop.ended(worker, status)

    def _gpus(self, host: str) -> dict[str, str]:
        """Each worker sees the GPUs of all slots of its host, of which the script takes that of its local rank."""
        if not self._making.num_gpus:
            return {}
        slots = max(self.slots.get(host, 0), sum(each == host for each in self.hosts.copy().values()))
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(slots * self._making.num_gpus)))}
