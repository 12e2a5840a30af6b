"""An elastic job in processes of this host and of ssh's."""

import sys
import threading
from dataclasses import replace
from typing import Any, final

from paceline.horovod.elastic_jobs.discovery import Discover
from paceline.horovod.elastic_jobs.driver import Policy
from paceline.horovod.elastic_jobs.known_hosts import Cooldown
from paceline.horovod.elastic_jobs.loop import LOOK_EVERY_S, Loop
from paceline.horovod.processes import Job, Ssh, WorkerProcess, value_of
from paceline.records import EventRecord


@final
class ElasticLaunch:
    """Args: as of `Loop`."""

    def __init__(
        self,
        job: Job,
        discover: Discover,
        *,
        policy: Policy,
        cooldown: Cooldown | None,
        ssh: Ssh,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._job, self._ssh = job, ssh
        policy = replace(policy, come_within_s=2 * job.start_within_s)
        self._loop = Loop(self, discover, policy=policy, cooldown=cooldown, look_every_s=look_every_s)
        self._processes: dict[int, WorkerProcess] = {}
        self._starting: set[int] = set()  # those that do not have the job yet
        self._results: dict[int, str] = {}

    def run(self) -> list[Any]:
        """What a function has returned, by rank of the last membership; None for those who have not. Raises as
        `Loop.run`."""
        try:
            self._loop.run()
        finally:
            for worker in self._processes:
                self.stop(worker)
            for process in self._processes.values():
                process.end()
        return [self._result(worker) for worker in self._loop.ranks] if callable(self._job.program) else []

    def start(self, worker: int, host: str) -> None:
        process = self._processes[worker] = WorkerProcess(host, self._ssh)
        self._starting.add(worker)

        def follow() -> None:
            late = threading.Timer(self._job.start_within_s, process.kill)
            late.start()
            has_come = process.hello() is not None
            if has_come:
                process.give(self._job, {})  # may take as long as nobody reads it
            late.cancel()
            is_to_go = worker not in self._starting
            self._starting.discard(worker)
            if has_come:
                own = self._job.hear(worker - 1, self._results)  # so that the first ones are known by their ranks
                process.listen(
                    lambda: str(self._loop.ranks.get(worker, host)),
                    {**own, "ask": lambda mine: self._loop.asked(worker, mine)},
                )
            elif not is_to_go:
                print(process.why_not(self._job.start_within_s), file=sys.stderr)
            self._loop.ended(worker, process.wait() or 0)

        threading.Thread(target=follow, name=f"paceline worker {worker}", daemon=True).start()

    def stop(self, worker: int) -> None:
        if worker in self._starting:  # its input may be under way, so that closing it would wait
            self._starting.discard(worker)
            self._processes[worker].kill()
        else:
            self._processes[worker].leave()

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        self._processes[worker].tell(message)

    def note(self, event: EventRecord) -> None:
        self._job.note(event)

    def _result(self, worker: int) -> Any:
        return value_of(self._results[worker - 1]) if worker - 1 in self._results else None
