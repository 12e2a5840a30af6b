"""Places a run's processes on the cluster, and hears where each of them is."""

import time
from collections.abc import Callable, Mapping

import ray
from ray.exceptions import RayError

from paceline.engines.ray.control import LauncherAddress
from paceline.engines.ray.job import Job
from paceline.engines.ray.members import Members, actor_of, last_line
from paceline.engines.ray.nodes import Node
from paceline.engines.ray.placing import places_of
from paceline.engines.ray.server_actor import ServerActor
from paceline.engines.ray.worker_actor import WorkerActor
from paceline.engines.ray.world_spec import ServerInfo, WorkerInfo
from paceline.errors import RunFailed

_TURN_S = 0.05


def start(
    job: Job, members: Members, launcher: LauncherAddress, *, turn: Callable[[], None], say: Callable[[str], None]
) -> bool:
    """Start all workers and servers as `members`, and return when each has said who it is.

    Args:
        launcher: the address at which it hears its members.
        turn: is called again and again meanwhile.
        say: shows a line where the run was started.

    Returns:
        Whether the workers compute on GPUs.

    Raises:
        RunFailed: one could not be started, or there is no room for it.
        UsageError: the cluster lacks what the job asks for.
    """
    uses_cuda, workers, servers = places_of(job, say)
    variables = {"runtime_env": {"env_vars": dict(job.environment)}} if job.environment else {}
    at: dict[str, Node] = {}
    for rank, where in enumerate(workers):
        worker = actor_of(WorkerActor, where, **variables)
        members.actors[f"worker-{rank}"] = worker.remote(uses_cuda=uses_cuda, host_cores=where.host_cores)
        at[f"worker-{rank}"] = where.node
    for index, where in enumerate(servers):
        server = actor_of(ServerActor, where, max_concurrency=3, **variables)
        members.actors[f"server-{index}"] = server.remote(launcher, index)
        at[f"server-{index}"] = where.node
    infos = _infos(members, at, turn, within_s=job.config.start_deadline_s)
    members.infos = {name: infos[name] for name in members.actors}
    return uses_cuda


def _infos(
    members: Members, at: Mapping[str, Node], turn: Callable[[], None], *, within_s: float
) -> Mapping[str, WorkerInfo | ServerInfo]:
    waiting = {actor.hello.remote(): name for name, actor in members.actors.items()}
    infos: dict[str, WorkerInfo | ServerInfo] = {}
    give_up_s = time.monotonic() + within_s
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_TURN_S)
        for future in ready:
            name = waiting.pop(future)
            try:
                infos[name] = ray.get(future)
            except RayError as error:
                why = last_line(error) if at[name].answers else "its host does not answer any more"
                raise RunFailed(f"{name} could not be started at {at[name].address}: {why}") from error
        turn()
        if time.monotonic() > give_up_s:
            missing = ", ".join(sorted(waiting.values()))
            raise RunFailed(
                f"{missing} did not start within {within_s:g} s; where hosts are slow, give more with --start-deadline "
                "SECONDS; the cluster may have no room: see `ray status`"
            )
    return infos
