"""What batch schedulers give a job, and the scripts and objects that ask for it. Pure: no process, no socket."""

from paceline.scheduler.allocation import Allocation
from paceline.scheduler.hostlist import expand
from paceline.scheduler.job_script import Asked, Job, array_script, job_script
from paceline.scheduler.ray_job import RayJob
from paceline.scheduler.ray_job_yaml import ray_job_yaml
from paceline.scheduler.reading import from_environment

__all__ = [
    "Allocation",
    "Asked",
    "Job",
    "RayJob",
    "array_script",
    "expand",
    "from_environment",
    "job_script",
    "ray_job_yaml",
]
