"""Processes of tests: forked from a server that has loaded what they import, so that they start in milliseconds."""

from __future__ import annotations

import multiprocessing

# There is one such server in a process, whoever asks for it: the list is everybody's. torch._dynamo is what the first
# optimizer would load otherwise, in most of a second.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed",
        "pytest",
        "hypothesis",
        "paceline.running.launch",
        "paceline.training.worker",
        "paceline.torch_backend",
    ]
)
