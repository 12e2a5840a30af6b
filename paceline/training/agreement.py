"""What workers must have alike, as each says of itself in a pause, and what is done where they differ."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from paceline.errors import TensorMismatch
from paceline.strategies.digests import digest
from paceline.strategies.progress import Progress, joint, require_same
from paceline.strategies.replica import named_parameters_of
from paceline.strategies.settings import Settings, first_difference, settings_of
from paceline.training.cadence import NEVER, Rhythm
from paceline.training.gradient_hooks import GradientHooks
from paceline.training.worker_run import WorkerRun

Report = Mapping[str, Any]

SHARE = 1e-3
"""The share of the time of training that checks may take."""
_MEETING_S = 1e-3  # what a check takes besides the digest
# Between two late checks: a pause has all workers begin their next step together, which is not on the clock.
_LEAST_STEPS = 16


@final
class Agreement:
    """Has workers that need one another until the last step compare their optimizers' settings, and how many steps and
    batches they have had; and those in lock-step their parameters.

    Clients' turns are their own, and in elastic rounds a worker takes steps that others have left. Buffers are not
    compared: batch norm's are of each worker's own batches, and the global model has their mean.
    """

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        traits, has_peers = run.traits, run.context.has_peers
        self.is_needed = traits.lock_step and has_peers
        """Whether parameters are to be alike."""
        is_own = run.strategy.participation() is not None or (run.config.elastic is not None and not traits.lock_step)
        self._steps_alike = has_peers and traits.takes_equal_steps and not is_own
        self._stepped_with: list[Settings] = []  # the optimizers' settings in the step before this pause
        self._due_at = 0 if self.is_needed else NEVER
        self._rhythm = Rhythm()
        self._took_s = self._comparing_s = 0.0
        self._has_told = False
        self._were_alike = False  # parameters, in the pause before
        self._hooks: GradientHooks | None = None

    def state(self) -> list[int]:
        """When parameters are compared next, and how far apart comparisons are: the same on every worker."""
        return [self._due_at, self._rhythm.interval]

    def take_up(self, state: Sequence[int]) -> None:
        """Compare when those do who gave this."""
        self._due_at, self._rhythm.interval = state

    def look_by(self, iteration: int) -> None:
        """Compare parameters in the pause at this iteration, if not before, where they are to be alike."""
        self._due_at = min(self._due_at, iteration) if self.is_needed else NEVER

    def note_settings(self) -> None:
        """A step has been taken that a pause follows: the script may set other values for the step alone."""
        self._stepped_with = self._present_settings() if self._steps_alike else []

    def said(self, *, is_last: bool) -> dict[str, Any]:
        """What this worker says of itself.

        Args:
            is_last: it takes no further step.
        """
        run = self._run
        if not self._steps_alike:
            return {}
        said = {
            "progress": list(run.prepared.handouts.progress()),
            "settings": hashlib.blake2b(repr(self._settings()).encode(), digest_size=8).hexdigest(),
        }
        return {**said, **self._parameters_said(is_last=is_last)} if self.is_needed else said

    def _parameters_said(self, *, is_last: bool) -> dict[str, Any]:
        run = self._run
        looks = is_last or run.config.strict or run.iteration >= self._due_at
        replica = run.prepared.replica
        if self._hooks is None:
            self._hooks = GradientHooks(named_parameters_of(replica.model), rank=run.context.rank)
        self._hooks.watch()
        before_s = run.context.pacing.now_s()
        parameters = digest(each for _, each in named_parameters_of(replica.model)) if looks else None
        self._took_s = run.context.pacing.now_s() - before_s if looks else self._took_s
        alike = run.prepared.same_gradients
        gradients, divisors = (alike.said(), alike.divisors.said()) if alike is not None else ([], [])
        outside = alike.outside.said() if alike is not None else []
        weights = alike.weights.said() if alike is not None and self._were_alike else []
        if alike is not None and not is_last:
            alike.begin()
        return {
            "gradients": gradients,
            "divisors": divisors,
            "outside": outside,
            "weights": weights,
            "parameters": parameters,
            "check_s": self._took_s + self._comparing_s,
        }

    def require(self, reports: Sequence[Report]) -> None:
        """Compare all workers' reports. Collective call.

        Raises:
            UsageError: a worker alone has left out a batch or a step.
            TensorMismatch: settings or parameters differ; the message names the first, the ranks, and what to do. A
                difference of parameters that is within rounding is told once, as an event.
        """
        if not self._steps_alike or any(report["waits_at"] for report in reports):  # one is ahead of the others
            return
        require_same([Progress(*report["progress"]) for report in reports], lock_step=self._run.traits.lock_step)
        if len({report["settings"] for report in reports}) > 1:
            self._compare_settings()
        if self.is_needed:
            self._compare_models(reports)

    def _compare_models(self, reports: Sequence[Report]) -> None:
        alike = self._run.prepared.same_gradients
        if alike is not None:
            alike.compare([report["gradients"] for report in reports])
            alike.divisors.compare([report["divisors"] for report in reports])
            alike.outside.compare([report["outside"] for report in reports])
            names = [spec.name for spec in self._run.prepared.replica.specs]
            alike.weights.compare([report["weights"] for report in reports], names, self._run.context.collective)
        before_s = self._run.context.pacing.now_s()
        parameters = {report["parameters"] for report in reports}
        self._were_alike = len(parameters) == 1 and None not in parameters
        if len(parameters) > 1:
            self._compare_parameters()
            self._comparing_s = self._run.context.pacing.now_s() - before_s

    def next_at(self, first: Report, *, iterations_per_s: float) -> int:
        """The iteration at which to compare parameters next, by rank 0's report: the first steps soon, later ones so
        seldom that this costs no more than its share."""
        iteration = self._run.iteration
        if self._run.config.strict and self.is_needed:
            self._due_at = iteration + 1
        elif iteration >= self._due_at:
            interval_s = (first["check_s"] + _MEETING_S) / SHARE
            self._due_at = self._rhythm.next(iteration, wanted=max(_LEAST_STEPS, interval_s * iterations_per_s))
        return self._due_at

    def _present_settings(self) -> list[Settings]:
        return [settings_of(optimizer) for optimizer in self._run.prepared.optimizers.values()]

    def _settings(self) -> list[Settings]:
        return [*self._present_settings(), *self._stepped_with]

    def _compare_settings(self) -> None:
        for each in zip(*self._run.context.collective.all_gather_object(self._settings()), strict=False):
            difference = first_difference(each)
            if difference is not None:
                traits = self._run.traits
                place = f"after {'round' if traits.unit == 'round' else 'step'} {self._run.iteration}"
                call = joint("worker.all_reduce(loss, op='mean')", lock_step=traits.lock_step)
                raise TensorMismatch(
                    f"{place} {difference}: parameters would drift apart. Compute it from what all ranks share: "
                    f"worker.metrics, or a loss after {call}"
                )

    def _compare_parameters(self) -> None:
        """Which tensors differ, and by how much."""
        run = self._run
        tensors = dict(named_parameters_of(run.prepared.replica.model))
        everyone = run.context.collective.all_gather_object({name: digest([t]) for name, t in tensors.items()})
        for rank, theirs in enumerate(everyone):
            strange = sorted(everyone[0].keys() ^ theirs.keys())
            if strange:
                raise TensorMismatch(f"of ranks 0 and {rank} only one has a parameter {strange[0]!r} now")
        suspects = [name for name in everyone[0] if len({theirs[name] for theirs in everyone}) > 1]
        distances = run.context.collective.all_gather_object([self._distance(tensors[name]) for name in suspects])
        for number, name in enumerate(suspects):
            far = [rank for rank, found in enumerate(distances) if not found[number][0] <= found[number][1]]
            if far:
                self._fail(name, far, distances[far[0]][number])
        if not self._has_told and suspects:
            self._has_told = True
            largest = max(found[0][0] for found in distances)
            run.tell("differs_by_rounding", {"parameter": suspects[0], "difference": largest})

    def _distance(self, tensor: Tensor) -> tuple[float, float]:
        """How far this rank's is from rank 0's, at most, and how far it may be. Processors of different kinds round
        differently, and that adds up over steps: half of a number's digits are left to it. Collective call."""
        theirs = tensor.detach().clone()
        self._run.context.collective.broadcast(theirs)
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        mine, theirs_wide = tensor.detach().to(wide), theirs.to(wide)
        is_same = (mine == theirs_wide) | (mine.isnan() & theirs_wide.isnan())
        distance = torch.where(is_same, 0.0, (mine - theirs_wide).abs()).max()
        is_exact = not (tensor.is_floating_point() or tensor.is_complex())
        resolution = 0.0 if is_exact else torch.finfo(tensor.dtype).eps ** 0.5
        return float(distance), resolution * float(theirs_wide.abs().nan_to_num().max())

    def _fail(self, name: str, far: Sequence[int], distance: tuple[float, float]) -> NoReturn:
        ranks = f"rank {far[0]}" if len(far) == 1 else f"ranks {', '.join(map(str, far))}"
        raise TensorMismatch(
            f"after step {self._run.iteration} parameter {name!r} is not the same on all ranks: on {ranks} it is up to "
            f"{distance[0]:.3g} from rank 0's (rounding explains {distance[1]:.1g}). Something changes parameters on "
            "each rank by itself: weights loaded on one rank, noise of a rank's own generator (give a torch.Generator "
            "the same seed on every rank), or a change that depends on a rank's own data. Make the "
            "same change on every rank"
        )
