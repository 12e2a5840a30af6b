"""Every Python that has this folder and the repository on its path waits longer for Ray to start."""

from tests import ray_forks

ray_forks.be_patient_in_program()
