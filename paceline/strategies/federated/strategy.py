"""Federated averaging: each round some clients train on their own data, and what they changed is joined."""

from dataclasses import dataclass
from typing import Literal, final, get_args

from paceline.aggregate import MEAN, Aggregator, Validation
from paceline.codec import Codec, TensorCodec
from paceline.correction import Correction
from paceline.errors import UsageError
from paceline.outer import Average, Outer
from paceline.partition import IID, Partition
from paceline.privacy import Privacy
from paceline.roster import Participation, Sampler, Uniform, num_drawn
from paceline.served.masking import MOST_NEIGHBOURS
from paceline.strategies.base import Context, Strategy, Synchronizer, option, require_choice
from paceline.strategies.federated.secured import LEAST_CLIENTS, Masks
from paceline.strategies.federated.synchronizer import FederatedSynchronizer
from paceline.strategies.federated.uploading import require_of_clients
from paceline.strategies.joint import AGGREGATE_DOC
from paceline.strategies.replica import Replica
from paceline.strategies.traits import ClientTurns, Traits

Weights = Literal["samples", "equal"]
OptimizerState = Literal["fresh", "kept"]


@final
@dataclass(frozen=True, kw_only=True)
class Federated(Strategy):
    """Rounds in which some of many clients train on data of their own; an outer optimizer steps with the mean of what
    they changed (FedAvg: McMahan et al., AISTATS 2017, algorithm 1).

    A pass of the script over its prepared loader is one client's turn: it begins with the server's parameters and ends
    when the script asks for the next pass. Workers are the processes that play clients, one after the other.

    With `correction=proximal` FedProx (Li et al., MLSys 2020, algorithm 2, where every client ends its epochs); with
    `outer=momentum` FedAvgM (Hsu et al., 2019), with `fed-adam` and so on adaptive servers (Reddi et al., ICLR 2021,
    algorithm 2); with `correction=control-variates` SCAFFOLD (Karimireddy et al., ICML 2020, algorithm 1); with
    `normalise` FedNova (Wang et al., NeurIPS 2020, section 4); with `private=norm` FedBN (Li et al., ICLR 2021); with
    `alternates` FedRep (Collins et al., ICML 2021, algorithm 1); with `sampler=buffered` FedBuff (Nguyen et al.,
    AISTATS 2022, algorithm 1).

    >>> Federated(clients=1000, fraction=0.01).traits.unit
    'round'
    """

    clients: int = option(100, "how many clients there are")
    fraction: float = option(0.1, "the part of them that takes part in a round")
    epochs: int = option(1, "a client's passes over its samples in a turn")
    partition: Partition = option(
        IID(),
        "who has which samples: iid, shards, dirichlet, column, file, ...",
    )
    sampler: Sampler = option(
        Uniform(), "who takes part in a round: uniform, by-size, poisson, cyclic, first, buffered"
    )
    weights: Weights = option("samples", "how much a client counts: by its samples, or all equal")
    aggregate: Aggregator = option(MEAN, AGGREGATE_DOC.replace("gradients", "the clients' changes"))
    reject: Validation | None = option(
        None, "which clients' changes do not count: validation, those that make the script's evaluation worse"
    )
    outer: Outer = option(
        Average(), "what steps with the mean change: average, momentum, nesterov, adam, fed-adam, fed-yogi, ..."
    )
    correction: Correction | None = option(None, "what is added to clients' gradients: proximal or control-variates")
    normalise: bool = option(False, "join clients' mean steps, so that those who take more do not count more")
    optimizer: OptimizerState = option("fresh", "its state when a turn begins: fresh, or kept by each client")
    private: str = option("", "layers that stay with each client: patterns of names with commas between, norm, or last")
    alternates: bool = option(False, "in a turn the private layers train first, alone, and then the shared ones")
    private_epochs: int = option(1, "passes over a client's samples for which the private layers train alone")

    codec: Codec | None = option(None, "the form in which clients send their changes, such as qsgd; none: as they are")
    privacy: Privacy | None = option(None, "what hides clients' changes under noise: central or local")
    secure: Masks | None = option(None, "what hides changes from the server: masks, which cancel out in the sum")

    def validate(self) -> None:
        require_choice("weights", self.weights, get_args(Weights))
        require_choice("optimizer", self.optimizer, get_args(OptimizerState))
        for name in ("clients", "epochs", "private_epochs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.fraction <= 1:
            raise UsageError(f"fraction must be above 0 and at most 1, not {self.fraction}")
        self.outer.require_possible()
        try:
            self.sampler.require(num_clients=self.clients, fraction=self.fraction)
        except ValueError as error:
            raise UsageError(f"sampler={self.sampler}: {error}") from None
        if self.sampler.overlaps and self.has_controls:
            raise UsageError(
                f"sampler={self.sampler} has turns begin in other rounds than they end in, and control variates follow "
                "the mean client of one round; leave correction=control-variates out"
            )
        if self.alternates and not self.private:
            raise UsageError("alternates=true has no effect without private=LAYERS, which train first")
        if self.private_epochs != 1 and not self.alternates:
            raise UsageError("private_epochs has no effect without alternates=true")
        if self.has_controls and self.private:
            raise UsageError(
                "control variates are differences to the mean client's direction, which private layers do not have; "
                "leave private or correction=control-variates out"
            )
        if not self.aggregate.streams:
            self._require_robust()
        if self.reject is not None:
            self._require_judged(self.reject)
        if self.privacy is not None:
            self._require_private(self.privacy)
        if self.secure is not None:
            self._require_summed(self.secure)
        self.codec_of_clients()

    def codec_of_clients(self) -> TensorCodec | None:
        """How changes are encoded. Raises UsageError for what clients cannot use."""
        if self.codec is None:
            return None
        is_private, is_secure = self.privacy is not None, self.secure is not None
        return require_of_clients(self.codec, keeps_state=self.keeps_state, is_private=is_private, is_secure=is_secure)

    def _require_judged(self, reject: Validation) -> None:
        """Raises UsageError where the server cannot judge the model with one client's change, or may not."""
        reasons = {
            "control variates are differences to the mean client's direction, and a client that is left out has moved "
            "its own; leave correction out": self.has_controls,
            "numbers of steps of those who are left would scale the joint; leave normalise out": self.normalise,
            "the server has no model with a client's private layers to judge; leave private out": bool(self.private),
            "privacy hides changes under noise, and who is left out tells of them; leave one out": (
                self.privacy is not None
            ),
            "the server judges single changes, and knows their sum alone; leave secure out": self.secure is not None,
        }
        for reason, holds in reasons.items():
            if holds:
                raise UsageError(f"reject={reject}: {reason}")

    def _require_summed(self, secure: Masks) -> None:
        """Raises UsageError where a round needs more than the sum of what clients changed."""
        num_clients = num_drawn(self.fraction, self.clients)
        reasons = {
            f"aggregate={self.aggregate} looks at single changes, and the server knows their sum alone; use the mean": (
                not self.aggregate.streams
            ),
            "controls would travel beside the sum; leave correction out": self.has_controls,
            "numbers of steps would travel beside the sum; leave normalise out": self.normalise,
            "nonfinite=allow lets values through that have no level; use skip": self.nonfinite == "allow",
            f"{num_clients} client(s) a round do not hide one another; use {LEAST_CLIENTS} or more": (
                num_clients < LEAST_CLIENTS
            ),
            "privacy.quantile needs a count beside the sum; leave it out": (
                self.privacy is not None and self.privacy.follows_norms
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise UsageError(f"secure={secure}: {reason}")

    def check_elsewhere(self) -> None:
        """Raises UsageError where clients elsewhere cannot hide what they changed."""
        masks, privacy, num_clients = self.secure, self.privacy, num_drawn(self.fraction, self.clients)
        if masks is None:
            return
        reasons = {
            "updates under masks are all of one form; leave codec out": self.codec is not None,
            "the server clips for privacy=central, and sees nothing to clip; use privacy=local": (
                privacy is not None and privacy.on_sum(num_expected=num_clients) is not None
            ),
            "clients elsewhere drop out by themselves; leave secure.lost out": masks.lost > 0,
            f"shares of so many clients are more than a message; give secure.neighbours, at most {MOST_NEIGHBOURS:,}": (
                (masks.neighbours or num_clients - 1) > MOST_NEIGHBOURS
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise UsageError(f"secure={masks}: {reason}")

    def _require_private(self, privacy: Privacy) -> None:
        """Raises UsageError where noise would not hide what a client changed, or nobody could say how well."""
        reasons = {
            "the clients of a round depend on who was quick before, and nobody knows what that costs; use "
            "sampler=poisson": self.sampler.draws_times,
            "one client may move the joint of this aggregate by more than its clipped change; leave aggregate out": (
                not self.aggregate.streams
            ),
            "control variates leave the client without noise; leave correction out": self.has_controls,
            "normalise=true divides changes after they are clipped; leave it out": self.normalise,
            "the model that is saved holds private layers, without noise; leave private out": bool(self.private),
            "nonfinite=allow lets changes through that nothing clips; use skip": self.nonfinite == "allow",
        }
        if privacy.on_sum(num_expected=self.fraction * self.clients) is not None:
            reasons |= {
                "a client with many samples would count more than its clip; use weights=equal": self.weights != "equal",
                "a client that is drawn twice would count twice its clip; use sampler=poisson": self.sampler.repeats,
                "what rounds cost is known where clients are drawn each for itself; use sampler=poisson": (
                    self.fraction < 1 and not self.sampler.is_independent
                ),
            }
        for reason, holds in reasons.items():
            if holds:
                raise UsageError(f"privacy={privacy}: {reason}")

    def _require_robust(self) -> None:
        """Raises UsageError where clients' changes are not to be joined otherwise than by their mean."""
        aggregate = self.aggregate
        if self.has_controls:
            raise UsageError(
                f"aggregate={aggregate} joins other than the mean, and control variates are differences to the mean "
                "client's direction; leave aggregate or correction=control-variates out"
            )
        if self.normalise:
            raise UsageError(
                f"aggregate={aggregate} compares clients' changes, and with normalise=true their numbers of steps "
                "would scale the joint; leave one of the two out"
            )
        fewest, why = num_drawn(self.fraction, self.clients), "a client gives one to each round"
        if self.sampler.ends_early:
            fewest, why = 1, f"sampler={self.sampler} may leave a round with one; leave its deadline out"
        try:
            aggregate.require(fewest)
        except ValueError as error:
            raise UsageError(f"aggregate={aggregate}: {error}; {why}") from None

    @property
    def has_controls(self) -> bool:
        return self.correction is not None and self.correction.keeps_state

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep anything from turn to turn."""
        return self.has_controls or bool(self.private) or self.optimizer == "kept"

    @property
    def traits(self) -> Traits:
        moved = ClientTurns(
            participation=self.participation(), codec=self.codec, num_besides=1.0 if self.has_controls else 0.0
        )
        return Traits(
            lock_step=False,
            unit="round",
            repeats_steps=not self.aggregate.remembers,
            passes_attacks=True,
            num_clients=self.clients,
            traffic=None if self._untold else (moved,),
            untold=self._untold,
        )

    @property
    def _untold(self) -> str:
        """Why nobody can say what moves."""
        reasons = {
            "has clients keep layers (private), and does not say how large those are that they share": self.private,
            "has workers gather each client's change (aggregate, reject), and does not say how much that is": (
                self.reject is not None or not self.aggregate.streams
            ),
            f"draws how long clients take (sampler={self.sampler.name}), and does not say how long workers do": (
                self.sampler.draws_times
            ),
            "has clients exchange keys and shares (secure), and does not say how many": self.secure is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def participation(self) -> Participation:
        return Participation(
            num_clients=self.clients,
            fraction=self.fraction,
            partition=self.partition,
            sampler=self.sampler,
            epochs=self.epochs + (self.private_epochs if self.alternates else 0),
            is_settled=self.keeps_state,
            weighs=self.weights == "samples",
            least=LEAST_CLIENTS if self.secure is not None else 1,
        )

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return FederatedSynchronizer(self, context, replica)
