"""The worlds in which virtual workers' scripts run, in whatever process that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from paceline.checkpoint import Checkpoint
from paceline.cluster.placement import Places
from paceline.comm.base import Collective, Store
from paceline.config import RunConfig
from paceline.engines.scripting import Outcome, Program, outcome_of, run_program
from paceline.engines.threads import spare_cores
from paceline.engines.virtual.computing.durations import ComputeTimes, StepCost
from paceline.engines.virtual.computing.pace import Pace, PromiseListener
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.process import Process
from paceline.engines.world import World, enter_here
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.records import Reporter
from paceline.strategies.base import Context


@final
class Worlds:
    """Makes the world of each worker.

    Args:
        places: where the job's workers are.

    Raises:
        UsageError: the device that the job asks for is not there.
    """

    def __init__(self, job: VirtualJob, places: Places) -> None:
        self._job, self._places = job, places
        self._hosts = job.cluster.each_host()
        self._device = device_of(job.config)
        # Each crew would take batches on a core of its own, and the simulation of crews has one, too.
        self._takes_batches_ahead = spare_cores(max(1, job.num_crews)) > job.num_crews

    def of(
        self,
        rank: int,
        process: Process,
        *,
        collective: Collective,
        store: Store | None,
        reporter: Reporter,
        before_step: Callable[[], None],
        on_promise: PromiseListener | None = None,
    ) -> World:
        """
        Args:
            before_step: called when a step's computing begins; may raise to end the worker.
            on_promise: told of the worker's promises.
        """
        job, places = self._job, self._places
        local_ranks = next(ranks for ranks in places.ranks_by_host if rank in ranks)
        pace = Pace(
            process,
            ComputeTimes(job.cluster.compute, seed=job.config.seed, rank=rank),
            StepCost(
                job.cluster,
                self._hosts[places.workers[rank]],
                num_sharing=len(local_ranks),
                num_hosts=len(places.ranks_by_host),
            ),
            compute=job.cluster.compute,
            before_step=before_step,
            on_promise=on_promise,
        )
        context = Context(
            rank=rank,
            membership=Membership.of_size(job.num_workers),
            local_rank=local_ranks.index(rank),
            local_size=len(local_ranks),
            device=self._device,
            collective=collective,
            store=store,
            now_s=lambda: process.now_s,
            watch=pace.watch,
            before_batch=pace.begin_batch,
            after_step=process.promise.stepped,
            between_steps=process.promise.end_step,
            takes_batches_ahead=self._takes_batches_ahead,
        )
        checkpoint = Checkpoint.decode(job.checkpoint, where="the checkpoint") if job.checkpoint is not None else None
        return World(context, job.strategy, job.config, reporter, checkpoint)


def run_in(make_world: Callable[[], World], program: Program) -> Outcome:
    """Run a worker's program in a world of its own, and say how that ended."""
    world: World | None = None
    try:
        world = make_world()
        enter_here(world)
        run_program(program)
        for finish in world.at_end:
            finish()
        return Outcome(num_steps=world.progress())
    except BaseException as error:
        return outcome_of(error, num_steps=world.progress() if world is not None else 0)
    finally:
        enter_here(None)


def device_of(config: RunConfig) -> torch.device:
    """All workers' device: that of the machine that simulates them.

    Raises:
        UsageError: it has none.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU; use --device cpu")
    uses_cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if uses_cuda else torch.device("cpu")
