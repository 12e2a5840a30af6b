"""Every Python that has this folder and the repository on its path waits longer for Ray to start, and has Ray's workers
forked."""

from tests import ray_forks

ray_forks.use_in_program()
