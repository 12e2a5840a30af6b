"""What batch schedulers give a job: its hosts, and the script that asks for them. Pure: no process, no socket."""

from paceline.scheduler.allocation import Allocation
from paceline.scheduler.hostlist import expand
from paceline.scheduler.job_script import Job, job_script
from paceline.scheduler.reading import from_environment

__all__ = ["Allocation", "Job", "expand", "from_environment", "job_script"]
