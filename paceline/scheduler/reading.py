"""Which scheduler has given this job its hosts."""

from collections.abc import Mapping

from paceline.scheduler.allocation import Allocation, from_slurm
from paceline.scheduler.sagemaker import from_sagemaker
from paceline.scheduler.slots import from_lsf, from_pbs


def from_environment(environment: Mapping[str, str], here: str | None = None) -> Allocation | None:
    """The allocation of SLURM, PBS or LSF that this process is the job script of, or of SageMaker, which starts it on
    each host. None outside one, and in another step or task of it, where each process would start its own cluster.

    Args:
        here: this host's name, for PBS and LSF, which do not tell it; None: not checked.

    Raises:
        UsageError: what the scheduler tells contradicts itself or cannot be read, or this is not the job's first host.
    """
    return (
        from_slurm(environment)
        or from_pbs(environment, here)
        or from_lsf(environment, here)
        or from_sagemaker(environment)
    )
