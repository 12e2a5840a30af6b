"""What `import horovod.torch as hvd` gives, on Paceline's collectives."""

from collections.abc import Sequence

from paceline.horovod import runtime as _basics
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from paceline.horovod.process_sets import enter as _enter_process_sets
from paceline.horovod.runtime import is_initialized, shutdown
from paceline.horovod.torch import elastic
from paceline.horovod.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from paceline.horovod.torch.compression import Compression
from paceline.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from paceline.horovod.torch.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    barrier,
    join,
    poll,
    synchronize,
)
from paceline.horovod.torch.optimizer import DistributedOptimizer
from paceline.horovod.torch.sync_batch_norm import SyncBatchNorm


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Meet the other ranks: those of `paceline run`, of torchrun, or none. Collective call; a second one does nothing.

    Args:
        comm: all ranks, or none given. Some of them are a process set here, as for Horovod without MPI.
        process_sets: to be initialized as well.

    Raises:
        ValueError: `comm` leaves ranks out.
    """
    is_first = not is_initialized()
    runtime = _basics.init()
    if comm is not None and sorted(comm) != list(range(runtime.size)):
        raise ValueError("init takes all ranks; give it the others' as process_sets")
    if is_first:
        _enter_process_sets(process_sets or ())


def size() -> int:
    """How many ranks there are."""
    return _basics.runtime().size


def local_size() -> int:
    """How many ranks are on this host."""
    return _basics.runtime().local_size


def cross_size() -> int:
    """How many hosts have a rank of this one's local number."""
    hosts: int = _basics.runtime().cross_size
    return hosts


def rank() -> int:
    """This process's number."""
    return _basics.runtime().rank


def local_rank() -> int:
    """This process's number among those of its host."""
    return _basics.runtime().local_rank


def cross_rank() -> int:
    """This host's number among those that have a rank of this one's local number."""
    host: int = _basics.runtime().cross_rank
    return host


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks."""
    return _basics.runtime().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write from here on, on rank 0, when operations were asked for and done. Raises OSError if the file cannot be."""
    if _basics.runtime().rank == 0:
        _basics.runtime().timeline.start(file_path, marks_cycles=mark_cycles)


def stop_timeline() -> None:
    """End what `start_timeline` has begun."""
    _basics.runtime().timeline.stop()


def mpi_threads_supported() -> bool:
    """There is no MPI here. Raises ValueError before `init`."""
    _basics.runtime()
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries control messages: never."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used: never."""
    return False


def gloo_enabled() -> bool:
    """Whether ranks meet without MPI: always."""
    return True


def gloo_built() -> bool:
    """Whether ranks can meet without MPI: always."""
    return True


def nccl_built() -> int:
    """NCCL's version if operations use it; they do not."""
    return 0


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    return False


def rocm_built() -> bool:
    return False


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
