"""Which arms of a study differ by more than chance explains.

An arm is a strategy on a number of workers. What a run measured, a time by its logarithm, is its arm's effect plus its
seed's (a block: all arms start from the same model and see the same data) plus noise whose spread all arms share. A run
that ended before it arrived enters by the probability of arriving later (Tobin, "Estimation of relationships for
limited dependent variables", Econometrica 26, 1958), in Olsen's parameters, in which the likelihood has one maximum
(Econometrica 46, 1978).

An arm may be the best unless another is better by more than chance explains, over all comparisons with it at once
(Gupta, Technometrics 7, 1965; Hsu, Annals of Statistics 12, 1984): at 95 %, the best is among those that are left.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_NUM_DRAWS = 10_000  # with which a 95 % quantile is known to about 0.02
_LEAST_SPREAD = 1e-3  # of a logarithm: where runs that arrived do not differ, the likelihood has no bound
_SAME = 1e-9  # between two numbers that only rounding tells apart

Arm: TypeAlias = tuple[str, int]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """What one run measured; smaller is better."""

    arm: Arm
    seed: int
    value: float
    has_arrived: bool = True
    """False: it would have taken longer than `value`, which is when it ended."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The arms of which at least one run arrived."""

    arms: tuple[Arm, ...]
    centres: Floats
    """What a run of each arm measures in the middle of all seeds. Shape (arms,)."""
    covariance: Floats
    """How uncertain the centres are, in units of the squared spread. Shape (arms, arms)."""
    are_linked: NDArray[np.bool_]
    """Whether two arms can be compared, through seeds that they share with each other or with others."""
    spread: float
    """Standard deviation of runs of the same arm and seed; NaN: no arm was run twice."""
    freedom: int
    """Degrees of freedom of the spread."""

    def may_be_best(self, *, among: Collection[Arm], noticed: Floats | float = 0.0) -> set[Arm]:
        """The arms of `among` that none of them beats by more than chance explains and than is `noticed`. All where
        the spread is not known."""
        chosen = [index for index, arm in enumerate(self.arms) if arm in among]
        behind = self.centres[:, None] - self.centres[None, :]
        beaten = behind > np.maximum(self.margins, noticed) + _SAME
        return {self.arms[k] for k in chosen if not beaten[k, chosen].any()}

    @cached_property
    def margins(self) -> Floats:
        """How far behind each arm (first axis) each other one may lie by chance, at 95 % for all others together.
        Infinite where it is not known."""
        if self.freedom < 1:
            return np.where(np.eye(len(self.arms), dtype=bool), 0.0, np.inf)
        critical = _critical_values(self.covariance.tobytes(), len(self.arms), self.freedom)
        margins = critical[:, None] * self.spread * _errors(self.covariance)
        return np.where(self.are_linked, margins, np.inf)


def compare(runs: Sequence[Run]) -> Comparison:
    """Fit all runs at once, without those of which nothing can be learnt: of arms, and then of seeds, of which none
    arrived."""
    kept = [run for run in runs if np.isfinite(run.value)]
    arms = tuple(dict.fromkeys(run.arm for run in kept if run.has_arrived))
    seeds = sorted({run.seed for run in kept if run.has_arrived})
    kept = [run for run in kept if run.arm in arms and run.seed in seeds]
    design = _design(kept, arms, seeds)
    values = np.array([run.value for run in kept])
    arrived = np.array([run.has_arrived for run in kept], dtype=bool)
    rank = int(np.linalg.matrix_rank(design)) if len(kept) else 0
    num_arrived, freedom = int(arrived.sum()), int(arrived.sum()) - rank
    effects = np.linalg.pinv(design) @ values
    residuals = values - design @ effects
    spread = float(np.sqrt(residuals @ residuals / num_arrived)) if num_arrived else np.nan
    information = design.T @ design
    if not arrived.all():
        effects, spread, information = _censored(design, values, arrived, effects, spread)
    covariance = np.linalg.pinv(information, hermitian=True)[: len(arms), : len(arms)].astype(np.float64)
    spread = spread * np.sqrt(num_arrived / freedom) if freedom > 0 else np.nan
    return Comparison(arms, effects[: len(arms)], covariance, _linked(design, len(arms)), float(spread), freedom)


def _design(runs: Sequence[Run], arms: Sequence[Arm], seeds: Sequence[int]) -> Floats:
    """A column an arm; a column a seed but the last, whose effect is what makes them add up to zero."""
    design = np.zeros((len(runs), len(arms) + max(0, len(seeds) - 1)))
    for row, run in zip(design, runs, strict=True):
        row[arms.index(run.arm)] = 1.0
        if run.seed == seeds[-1]:
            row[len(arms) :] = -1.0
        else:
            row[len(arms) + seeds.index(run.seed)] = 1.0
    return design


def _linked(design: Floats, num_arms: int) -> NDArray[np.bool_]:
    """A difference can be known where it is a combination of rows of the design."""
    projection = (np.linalg.pinv(design) @ design)[:num_arms]
    off = projection - np.eye(*projection.shape)
    is_linked: NDArray[np.bool_] = np.abs(off[:, None, :] - off[None, :, :]).max(axis=-1, initial=0.0) < 1e-6
    return is_linked


def _censored(
    design: Floats, values: Floats, arrived: NDArray[np.bool_], effects: Floats, spread: float
) -> tuple[Floats, float, Floats]:
    """Effects and spread of greatest likelihood, and the observed information of the effects times the squared spread.

    With theta = 1 / spread and gamma = theta * effects, z = theta * value - design @ gamma is a standard normal
    number, of which is known what it is (arrived) or exceeds.
    """
    from scipy.optimize import minimize
    from scipy.special import log_ndtr

    rows = np.column_stack([-design, values])

    def hazard(z: Floats) -> Floats:
        rate: Floats = np.exp(-0.5 * z * z - 0.5 * np.log(2 * np.pi) - log_ndtr(-z))
        return rate

    def loss(point: Floats) -> tuple[float, Floats]:
        z, theta = rows @ point, point[-1]
        loss = 0.5 * z[arrived] @ z[arrived] - arrived.sum() * np.log(theta) - log_ndtr(-z[~arrived]).sum()
        slope = rows.T @ np.where(arrived, z, hazard(z))
        slope[-1] -= arrived.sum() / theta
        return float(loss), slope

    theta = 1 / max(spread, _LEAST_SPREAD)
    start = np.append(theta * effects, theta)
    bounds = [(None, None)] * len(effects) + [(1e-6, 1 / _LEAST_SPREAD)]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 2000}).x
    theta, z = found[-1], rows @ found
    weights = np.where(arrived, 1.0, hazard(z) * (hazard(z) - z))
    whole = rows.T @ (weights[:, None] * rows)
    whole[-1, -1] += arrived.sum() / theta**2
    # The effects are gamma / theta; what is not known of theta adds to what is not known of them.
    effects = found[:-1] / theta
    jacobian = np.column_stack([np.eye(len(effects)), -effects])
    information = np.linalg.pinv(jacobian @ np.linalg.pinv(whole, hermitian=True) @ jacobian.T, hermitian=True)
    return effects, 1 / theta, information


def _errors(covariance: Floats) -> Floats:
    """Standard errors of all differences, in units of the spread."""
    own = np.diag(covariance)
    errors: Floats = np.sqrt(np.maximum(own[:, None] + own[None, :] - 2 * covariance, 0.0))
    return errors


@lru_cache(maxsize=64)
def _critical_values(covariance_bytes: bytes, num_arms: int, freedom: int) -> Floats:
    """For each arm, how many standard errors the largest of its leads over the others stays below by chance at 95 %.

    By simulation, which no pattern of missing runs troubles (Edwards and Berry, Biometrics 43, 1987); always with the
    same draws. Shape (arms,).
    """
    covariance = np.frombuffer(covariance_bytes).reshape(num_arms, num_arms)
    if num_arms < 2:
        return np.zeros(num_arms)
    draws = np.random.default_rng(0)
    values, vectors = np.linalg.eigh(covariance)
    noise = draws.standard_normal((_NUM_DRAWS, num_arms)) @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    noise /= np.sqrt(draws.chisquare(freedom, (_NUM_DRAWS, 1)) / freedom)
    errors = _errors(covariance) + np.diag(np.full(num_arms, np.inf))
    leads = [((noise[:, [arm]] - noise) / errors[arm]).max(axis=1) for arm in range(num_arms)]
    critical: Floats = np.quantile(np.array(leads), CONFIDENCE, axis=1)
    return critical
