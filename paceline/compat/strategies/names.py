"""TensorFlow's strategies by name: which of Paceline's does the same, and with how many workers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch

from paceline.compat.strategies.base import DistributionStrategy
from paceline.compat.strategies.cluster_resolver import VARIABLE, TFConfigClusterResolver, WrongTFConfig
from paceline.compat.strategies.devices import workers_on
from paceline.config import DeviceChoice
from paceline.engines.world import current
from paceline.errors import UsageError
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import require_choice
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.single import Single

Implementation = Literal["AUTO", "RING", "NCCL"]


@final
@dataclass(frozen=True)
class CommunicationOptions:
    """What `MultiWorkerMirroredStrategy` says about its exchange, as `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        UsageError: a number is none, or the implementation is not one that can be chosen here.
    """

    bytes_per_pack: int = 0
    """Size of a bucket of gradients; 0: as measured at the start."""
    timeout_seconds: float | None = None
    """How long any wait for a peer may take; None: Paceline's own."""
    implementation: Implementation = "AUTO"
    """AUTO: the fastest for the world at hand; RING: over send and receive, to compare; NCCL is refused."""

    def __post_init__(self) -> None:
        if self.implementation == "NCCL":
            raise UsageError("implementation=NCCL cannot be chosen: GPUs of several hosts use it anyway; leave it out")
        require_choice("implementation", self.implementation, ("AUTO", "RING"))
        for name, value, least in (
            ("bytes_per_pack", self.bytes_per_pack, 0),
            ("timeout_seconds", self.timeout_seconds, 1),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
                raise UsageError(f"{name} must be at least {least}, not {value!r}")

    def strategy(self) -> AllReduce:
        """The all-reduce that does so."""
        return AllReduce(
            algorithm="ring" if self.implementation == "RING" else "auto",
            bucket_mb=self.bytes_per_pack / 1e6 if self.bytes_per_pack else "auto",
        )


@final
class MirroredStrategy(DistributionStrategy):
    """Synchronous training on the devices of one host: `all-reduce`.

    Args:
        devices: one worker each, such as `["GPU:0", "GPU:1"]`; none: every GPU, or one worker on the processor.
        workers: as many workers, where devices are not named.

    Raises:
        UsageError: both are given, or an option has no meaning here.
    """

    def __init__(
        self, devices: Sequence[str] | None = None, cross_device_ops: object = None, *, workers: int | None = None
    ) -> None:
        _refuse(self, cross_device_ops=cross_device_ops, why="the fastest all-reduce is chosen for the workers at hand")
        count, device = _on_devices(self, devices, workers, option="devices")
        super().__init__(AllReduce(), workers=count, default=_num_gpus(), device=device, is_of_one_host=True)


@final
class CentralStorageStrategy(DistributionStrategy):
    """Synchronous training on the devices of one host, whose parameters one server beside them holds:
    `central-storage`, which is `ps-bsp` with one server.

    Args:
        compute_devices: one worker each; none: every GPU, or one worker on the processor.
        parameter_device: where the server keeps parameters: `CPU:0`, or none.
        workers: as many workers, where devices are not named.

    Raises:
        UsageError: both are given, or an option cannot be had.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        workers: int | None = None,
    ) -> None:
        if parameter_device is not None and workers_on([parameter_device], option="parameter_device")[1] != "cpu":
            raise UsageError(
                f"parameter_device={parameter_device}: servers keep parameters in the host's memory; say CPU:0, or "
                "leave it out"
            )
        count, device = _on_devices(self, compute_devices, workers, option="compute_devices")
        strategy = ParameterServer(consistency="bsp", servers=1)
        super().__init__(strategy, workers=count, default=_num_gpus(), device=device, is_of_one_host=True)


@final
class MultiWorkerMirroredStrategy(DistributionStrategy):
    """Synchronous training on several hosts: `all-reduce`, one worker for the chief and one for each worker.

    Args:
        cluster_resolver: the cluster; none: that of TF_CONFIG, if it is set and `workers` is not given.
        communication_options: of the exchange.
        workers: as many workers, where no cluster is described.

    Raises:
        UsageError: TF_CONFIG cannot be read, has servers or nobody who trains; or two things say how many workers.
    """

    def __init__(
        self,
        cluster_resolver: TFConfigClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        workers: int | None = None,
    ) -> None:
        resolver = _resolver(self, cluster_resolver, workers)
        if resolver is not None:
            if resolver.num_tasks("ps"):
                raise WrongTFConfig("TF_CONFIG.cluster.ps: all-reduce has no servers; use ParameterServerStrategy")
            workers = _trained_by(resolver, "chief", "worker")
        communication = communication_options or CommunicationOptions()
        super().__init__(
            communication.strategy(),
            workers=workers,
            resolver=resolver,
            hosts=resolver.hosts("chief", "worker") if resolver is not None else (),
            deadline_s=communication.timeout_seconds,
        )


@final
class ParameterServerStrategy(DistributionStrategy):
    """Asynchronous training with servers: `ps-asp`, where every worker's gradient is an update.

    The chief of a cluster coordinates in TensorFlow; here it is where the run is started, and does not train.

    Args:
        cluster_resolver: the cluster; none: that of TF_CONFIG, if it is set and no numbers are given.
        workers, servers: how many, where no cluster is described; in a process that trains, those of its run; else 1.

    Raises:
        UsageError: TF_CONFIG cannot be read, or has no workers or servers; two things say how many; or an option has
            no meaning here.
    """

    def __init__(
        self,
        cluster_resolver: TFConfigClusterResolver | None = None,
        variable_partitioner: object = None,
        *,
        workers: int | None = None,
        servers: int | None = None,
    ) -> None:
        _refuse(
            self,
            variable_partitioner=variable_partitioner,
            why="each server has one range of all parameters, of as many bytes as the others'",
        )
        resolver = _resolver(self, cluster_resolver, workers if servers is None else servers)
        if resolver is not None:
            workers, servers = _trained_by(resolver, "worker"), resolver.num_tasks("ps")
            if not servers:
                raise WrongTFConfig(
                    "TF_CONFIG.cluster.ps is missing; name the servers, or use MultiWorkerMirroredStrategy"
                )
        takes_any_servers = servers is None
        if servers is None:
            world = current()
            servers = max(1, world.strategy.traits.num_servers) if world is not None else 1
        super().__init__(
            ParameterServer(consistency="asp", servers=servers),
            workers=workers,
            resolver=resolver,
            hosts=resolver.hosts("worker") if resolver is not None else (),
            takes_any_servers=takes_any_servers,
        )


@final
class OneDeviceStrategy(DistributionStrategy):
    """One worker, which exchanges nothing: `single`.

    Args:
        device: `CPU:0` or `GPU:0`; another GPU is chosen with CUDA_VISIBLE_DEVICES.

    Raises:
        UsageError: there is no such device here.
    """

    def __init__(self, device: str) -> None:
        _, place = workers_on([device], option="device")
        super().__init__(Single(), workers=1, device=place)


def _on_devices(
    owner: DistributionStrategy, devices: Sequence[str] | None, workers: int | None, *, option: str
) -> tuple[int | None, DeviceChoice]:
    if devices is None:
        return workers, "auto"
    if workers is not None:
        raise UsageError(f"{owner.name}: {option} and workers both say how many; leave one out")
    return workers_on(devices, option=option)


def _resolver(
    owner: DistributionStrategy, given: TFConfigClusterResolver | None, number: int | None
) -> TFConfigClusterResolver | None:
    """The cluster that is described, if one is: a number that is given goes before the environment's."""
    if given is not None and number is not None:
        raise UsageError(f"{owner.name}: cluster_resolver says how many workers and servers; leave the numbers out")
    if given is not None and not isinstance(given, TFConfigClusterResolver):
        raise UsageError(
            f"{owner.name}: cluster_resolver must be a TFConfigClusterResolver, not {type(given).__name__}"
        )
    if given is None and number is None and os.environ.get(VARIABLE):
        return TFConfigClusterResolver()
    return given


def _trained_by(resolver: TFConfigClusterResolver, *jobs: str) -> int:
    number = resolver.num_tasks(*jobs)
    if not number:
        raise WrongTFConfig(f"TF_CONFIG.cluster.{jobs[-1]} is missing; name the hosts that train")
    return number


def _refuse(owner: DistributionStrategy, *, why: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{owner.name}: {name} has no meaning here: {why}; leave it out")


def _num_gpus() -> int:
    """How many GPUs there are, or 1: without one a worker computes on the processor."""
    return max(1, torch.cuda.device_count())
