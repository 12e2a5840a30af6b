"""The options of elastic jobs, on the command line and of `horovod.run`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, final

from paceline.errors import UsageError
from paceline.horovod.elastic_jobs import discovery
from paceline.horovod.elastic_jobs.driver import Policy
from paceline.horovod.elastic_jobs.known_hosts import Cooldown
from paceline.horovod.hosts import parse_hosts


@final
@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What was given of them; a script that finds hosts, or a least number of workers, makes a job elastic.

    Raises UsageError where others are given without these.
    """

    host_discovery_script: str | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots_per_host: int | None = None
    elastic_timeout: float | None = None
    reset_limit: int | None = None
    blacklist_cooldown_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None and not self.is_asked_for:
                raise UsageError(
                    f"--{field.name.replace('_', '-')} is for elastic jobs: give --host-discovery-script or "
                    "--min-num-proc, too, or leave it out"
                )

    @property
    def is_asked_for(self) -> bool:
        return self.host_discovery_script is not None or self.min_num_proc is not None

    def arguments(self, num_proc: int, hosts: Sequence[str]) -> dict[str, Any]:
        """What `ElasticLaunch` takes of them.

        Args:
            num_proc: processes to start with.
            hosts: as `name:slots`; none: this host alone, unless a script finds them.

        Raises:
            UsageError: they contradict one another.
        """
        slots = self.slots_per_host or 1
        if self.host_discovery_script is not None:
            if hosts:
                raise UsageError("give hosts, or --host-discovery-script, not both")
            discover = discovery.by_script(self.host_discovery_script, slots=slots)
        else:
            known = parse_hosts(hosts or [f"localhost:{self.max_num_proc or num_proc}"], slots=slots)
            discover = discovery.fixed(dict(known))
        timeout_s = self.elastic_timeout
        return {
            "discover": discover,
            "policy": Policy(
                num_proc=num_proc,
                min_num_proc=num_proc if self.min_num_proc is None else self.min_num_proc,
                max_num_proc=self.max_num_proc,
                elastic_timeout_s=Policy.elastic_timeout_s if timeout_s is None else timeout_s,
                reset_limit=self.reset_limit,
            ),
            "cooldown": None if self.blacklist_cooldown_range is None else Cooldown(*self.blacklist_cooldown_range),
        }
