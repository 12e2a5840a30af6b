"""What belongs to clients alone: private layers, controls, and the state of the script's optimizer."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.arrays import is_finite
from paceline.comm.base import Collective
from paceline.correction import Control
from paceline.server.state import export_state, import_state
from paceline.strategies.federated.kept import Kept
from paceline.strategies.own_state import Fate, OwnState
from paceline.strategies.replica import Replica, named_parameters_of

_CLIENT, _INITIAL, _IN_PLACE = "client.", "initial.", "in_place."
_PRIVATE, _CONTROL, _OPTIMIZER, _LEFT = "private.", "control.", "optimizer.", "left."


@final
class Clients:
    """One client's part at a time is in this worker's model; those of others wait in a file.

    Args:
        private: names of the parameters and buffers that are each client's own.
        shared_controls: the server's; none where clients have no controls.
        keeps_optimizer: whether a client goes on with its optimizer's state, rather than with a fresh one.
        by_all: every worker keeps what all clients do, once a round counts, so that it outlives the one that played.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        private: frozenset[str],
        shared_controls: Sequence[Tensor],
        keeps_optimizer: bool,
        by_all: bool = False,
    ) -> None:
        self._replica, self._shared_controls = replica, shared_controls
        self._names = private
        self._initial = {name: tensor.clone() for name, tensor in self.private.items()}
        self._fresh = export_state(replica.optimizer, replica.parameters)
        self._keeps_optimizer = keeps_optimizer
        self._kept, self._by_all = Kept(), by_all
        self._of_round: dict[int, dict[str, Tensor]] = {}  # there, what this worker's clients are to keep of it

    @property
    def private(self) -> dict[str, Tensor]:
        """This worker's private tensors. A model may put other buffers in the places of those that it had."""
        if not self._names:
            return {}
        replica = self._replica
        named = [*named_parameters_of(replica.model), *replica.model.named_buffers()]
        own = {id(tensor) for tensor in (*replica.all_parameters, *replica.buffers)}
        return {name: tensor.detach() for name, tensor in named if name in self._names and id(tensor) in own}

    def first_nonfinite(self) -> str | None:
        """The name of a private tensor in place that is not finite, as running statistics of a bad batch become."""
        return next((name for name, tensor in self.private.items() if not is_finite(tensor)), None)

    def load(self, client: int) -> list[Control]:
        """The client's turn begins; returns its controls, one a shared parameter."""
        kept = self._kept[client]
        self._put(kept)
        self._replica.optimizer.state.clear()
        if state := _without(_OPTIMIZER, kept) or self._fresh:
            import_state(self._replica.optimizer, self._replica.parameters, state)
        zeros = map(torch.zeros_like, self._shared_controls)
        own = [kept.get(f"{_CONTROL}{index}", zero).to(zero.device) for index, zero in enumerate(zeros)]
        return [Control(*pair) for pair in zip(own, self._shared_controls, strict=True)]

    def put_back(self, client: int) -> None:
        """The client's turn came to nothing: its private layers are as it keeps them."""
        self._put(self._kept[client])

    def _put(self, kept: Mapping[str, Tensor]) -> None:
        for name, tensor in self.private.items():
            tensor.copy_(kept.get(_PRIVATE + name, self._initial[name]))

    def left_of(self, client: int) -> list[Tensor]:
        """What the codec left out of the client's last change, one a tensor; nothing if it has kept nothing."""
        kept, device = _without(_LEFT, self._kept[client]), self._replica.parameters[0].device
        return [kept[str(index)].to(device) for index in range(len(kept))]

    def keep(self, client: int, controls: Sequence[Tensor], left: Sequence[Tensor] = ()) -> None:
        """The client's turn is over, and these are its own controls from here on, and what is left of its change."""
        kept = {_PRIVATE + name: tensor for name, tensor in self.private.items()} | _besides(controls, left)
        if self._keeps_optimizer:
            state = export_state(self._replica.optimizer, self._replica.parameters)
            kept |= {_OPTIMIZER + name: tensor for name, tensor in state.items()}
        if kept and self._by_all:
            self._of_round[client] = {name: tensor.detach().clone() for name, tensor in kept.items()}
        elif kept:
            self._kept.put(client, kept)

    def amend(self, client: int, controls: Sequence[Tensor], left: Sequence[Tensor]) -> None:
        """These are its controls after all, and this is what is left of its change."""
        if besides := _besides(controls, left):
            self._kept.put(client, self._kept[client] | besides)

    def gathered(self, collective: Collective) -> dict[int, dict[str, Tensor]]:
        """What all workers' clients are to keep of the round. Collective call."""
        everyone = collective.all_gather_object(self._of_round)
        return {client: kept for own in everyone for client, kept in own.items()}

    def end_round(self, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
        """The round counts, and its clients keep this."""
        for client, tensors in kept.items():
            self._kept.put(client, tensors)
        self._of_round = {}

    def own_state(self) -> dict[str, OwnState]:
        """A checkpoint holds what this worker keeps of clients, how private layers begin, which is the same on all
        workers, and those that are in place, since the saved model has their mean."""
        initial = {_INITIAL + name: OwnState(tensor, "same") for name, tensor in self._initial.items()}
        fate: Fate = "same" if self._by_all else "reset"
        in_place = {} if self._by_all else {_IN_PLACE + name: OwnState(each) for name, each in self.private.items()}
        return (
            initial
            | in_place
            | {
                f"{_CLIENT}{client}.{name}": OwnState(tensor, fate)
                for client in self._kept
                for name, tensor in self._kept[client].items()
            }
        )

    @torch.no_grad()
    def restore(self, own: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave, as far as it is there and such layers are private here."""
        for prefix, tensors in ((_INITIAL, self._initial), (_IN_PLACE, self.private)):
            saved = _without(prefix, own)
            for name in tensors.keys() & saved.keys():
                tensors[name].copy_(saved[name])
        clients: dict[int, dict[str, Tensor]] = {}
        for path, tensor in _without(_CLIENT, own).items():
            client, _, name = path.partition(".")
            clients.setdefault(int(client), {})[name] = tensor
        for number, kept in clients.items():
            self._kept.put(number, kept)

    def close(self) -> None:
        self._kept.close()


def what_clients_keep(own: Sequence[Mapping[str, Tensor]]) -> tuple[frozenset[str], dict[str, Tensor]]:
    """Of what workers gave as their own states: names of private layers, and what each client keeps."""
    all_own = {name: tensor for each in own for name, tensor in each.items()}
    return frozenset(_without(_INITIAL, all_own)), _without(_CLIENT, all_own)


def _besides(controls: Sequence[Tensor], left: Sequence[Tensor]) -> dict[str, Tensor]:
    of_controls = {f"{_CONTROL}{index}": control for index, control in enumerate(controls)}
    return of_controls | {f"{_LEFT}{index}": tensor for index, tensor in enumerate(left)}


def _without(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What has the prefix, by the rest of its name."""
    return {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
