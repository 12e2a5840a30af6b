"""What a job asks Kubernetes for, and runs there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from paceline.errors import UsageError
from paceline.scheduler import kubernetes_words as words

SCRIPTS, RESULTS = "/paceline/script", "/paceline/results"
"""Folders in the head's container."""

_LARGEST_SCRIPT = 2**20


@final
@dataclass(frozen=True, kw_only=True)
class RayJob:
    """What a job asks Kubernetes for, and runs. Raises UsageError for a name or a quantity that Kubernetes refuses.

    The head only starts the run and writes its results; workers and servers are on the other hosts.
    """

    name: str
    namespace: str
    image: str
    """The image, which has Python, torch, Paceline and Ray with its dashboard."""
    nodes: int
    """Hosts that train, a pod each."""
    bounds: tuple[int, int]
    """The operator keeps the number of hosts between these two."""
    cores: int
    memory: str
    gpus: int
    """Cores, memory and GPUs are those of each host."""
    head_cores: int
    head_memory: str
    ray_version: str
    """The version of Ray in the image."""
    command: Sequence[str]
    """`paceline run` with all that it is given."""
    script: tuple[str, str] | None
    """Its file's name and its text, to be found in `SCRIPTS`; None: it is in the image."""
    token_secret: str
    """The Secret with the cluster's token."""
    service_account: str | None = None
    pull_secret: str | None = None
    """The Secret with which the image is fetched."""
    results_claim: str | None = None
    """The PersistentVolumeClaim that is to be at `RESULTS`; None: what is there goes with the head."""
    shares_claim: bool = False
    """Whether the claim is also on the hosts that train."""

    def __post_init__(self) -> None:
        words.job_name(self.name, option="--name")
        words.namespace(self.namespace, option="--namespace")
        words.image(self.image, option="--image")
        words.memory(self.memory, option="--memory")
        words.memory(self.head_memory, option="--head-memory")
        words.ray_version(self.ray_version, option="--ray-version")
        words.object_name(self.token_secret, option="--token-secret")
        for option, given in (
            ("--service-account", self.service_account),
            ("--pull-secret", self.pull_secret),
            ("--results-claim", self.results_claim),
        ):
            if given is not None:
                words.object_name(given, option=option)
        if self.shares_claim and self.results_claim is None:
            raise UsageError("--shared-claim has no effect without --results-claim CLAIM")
        if self.script is not None:
            _require_room(*self.script)


def _require_room(name: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > _LARGEST_SCRIPT:
        raise UsageError(
            f"the script {name} has {size:,} bytes, and a ConfigMap takes {_LARGEST_SCRIPT:,} (1 MiB); put it into the "
            "image, and say --script-in-image"
        )
    if name.startswith(".."):
        raise UsageError(f"the script {name} cannot have this name in a ConfigMap; let it not begin with ..")
