"""One script, or one function, on hosts that stay what they are."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, final

from paceline.errors import RunFailed
from paceline.horovod.errors import FAILED, how_ended
from paceline.horovod.hosts import Host, fill, is_here, places
from paceline.horovod.processes import Job, Ssh, WorkerProcess, value_of

_LOOK_S = 0.1


@final
class Launch:
    """Args:
    job: its variables are those of every process, besides its own host's.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], *, num_proc: int, ssh: Ssh) -> None:
        self._job, self._ssh = job, ssh
        self._hosts = fill(hosts, num_proc)
        self._processes: list[WorkerProcess] = []
        self._results: dict[int, str] = {}

    def run(self) -> list[Any]:
        """Run it on every rank, with their output here. Returns once all have ended: what a function returned, by rank.

        Raises:
            RunFailed: a host cannot be reached, or a rank fails, which ends the others.
        """
        try:
            for host in self._hosts:
                self._processes.append(WorkerProcess(host, self._ssh))
            first = self._hear_hellos()
            for rank, (process, place) in enumerate(zip(self._processes, places(self._hosts), strict=True)):
                process.give(self._job, self._variables(place, first))
                process.listen(lambda rank=rank: str(rank), self._job.hear(rank, self._results))  # type: ignore[misc]
            self._watch()
        finally:
            for process in self._processes:
                process.leave()
            for process in self._processes:
                process.end()
        return [value_of(self._results[rank]) for rank in range(len(self._hosts))] if self._results else []

    def _hear_hellos(self) -> Mapping[str, Any]:
        """What the first rank says of itself, once all have answered."""
        late = threading.Timer(self._job.start_within_s, self._give_up)
        late.start()
        try:
            for process in self._processes:
                if (hello := process.hello()) is None:
                    raise RunFailed(process.why_not(self._job.start_within_s))
                if process is self._processes[0]:
                    first = hello
        finally:
            late.cancel()
        return first

    def _give_up(self) -> None:
        """Have reading the hellos end."""
        for process in self._processes:
            process.kill()

    def _variables(self, place: Mapping[str, int], first: Mapping[str, Any]) -> dict[str, str]:
        """Where ranks meet is on the first one's host."""
        name = self._hosts[0].rpartition("@")[2]
        address = first["address"] if is_here(name) else name
        return {
            "RANK": str(place["RANK"]),
            "WORLD_SIZE": str(place["SIZE"]),
            "LOCAL_RANK": str(place["LOCAL_RANK"]),
            "LOCAL_WORLD_SIZE": str(place["LOCAL_SIZE"]),
            **{f"HOROVOD_{name}": str(value) for name, value in place.items()},
            "TORCHELASTIC_RUN_ID": "horovodrun",
            "MASTER_ADDR": "127.0.0.1" if all(map(is_here, self._hosts)) else address,
            "MASTER_PORT": str(first["port"]),
        }

    def _watch(self) -> None:
        """Wait for all. Raises RunFailed, which names the first rank to fail and its host."""
        running = dict(enumerate(self._processes))
        while running:
            for rank, process in [*running.items()]:
                status = process.wait(_LOOK_S / len(running))
                if status is not None:
                    del running[rank]
                if status:
                    raise RunFailed(f"{FAILED}: first rank {rank} on {process.host} {how_ended(status)}")
