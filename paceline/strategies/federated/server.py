"""What the server of a federated run holds, on every worker alike."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from paceline.aggregate import Aggregator, Contribution, Validation
from paceline.arrays import clones, is_finite, overwrite
from paceline.errors import UsageError
from paceline.layout import TensorSpec
from paceline.outer import Outer
from paceline.server.state import export_state, import_state
from paceline.strategies.base import Context
from paceline.strategies.digests import require_same
from paceline.strategies.elsewhere import ClientUpdate
from paceline.strategies.federated.buffers import change_of, moved, real_dtype
from paceline.strategies.federated.guard import Guard
from paceline.strategies.federated.joining import Joined, Joining
from paceline.strategies.federated.past import Past, Version
from paceline.strategies.federated.rejecting import Rejecting
from paceline.strategies.federated.scales import Scales
from paceline.strategies.federated.secured import Masks
from paceline.strategies.federated.uploading import Upload
from paceline.strategies.own_state import OUTER, OwnState, taken_up
from paceline.strategies.replica import Replica, copy_tensors_from_first

_CONTROL = "shared_control."


@final
class ServerModel:
    """The parameters and buffers that clients share, the outer optimizer, and the mean of the clients' controls.

    What the clients changed of buffers is averaged as of parameters, and applied as it is.

    Args:
        private: names of what stays with the clients.
        has_controls: whether clients have controls, as `paceline.correction` says.
        guard: hides what clients changed under noise, if anything does.
        masks: hide it from the server, if anything does.
        reject: which clients' changes do not count.
        upload: what changes are encoded by, if by anything; it matters where clients and server are apart.
        normalises: clients say how many steps their changes are worth, and changes count by the step.
        allows_nonfinite: changes of such clients may be infinite, or no numbers.

    Raises:
        UsageError: the optimizer trains private layers alone.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        *,
        outer: Outer,
        aggregator: Aggregator,
        private: frozenset[str],
        has_controls: bool,
        guard: Guard | None = None,
        masks: Masks | None = None,
        reject: Validation | None = None,
        upload: Upload | None = None,
        normalises: bool = False,
        allows_nonfinite: bool = False,
    ) -> None:
        specs = [spec for spec in replica.specs if spec.name not in private]
        if not specs:
            raise UsageError(
                f"all parameters of {type(replica.optimizer).__name__} are private, {replica.specs[0].name!r} "
                "the first, so that clients share none of them; name fewer layers in private"
            )
        self._names = [spec.name for spec in specs]
        self.groups = [spec.group for spec in specs]
        """For each shared parameter, its group in the script's optimizer."""
        named = zip(replica.specs, replica.parameters, strict=True)
        self.trained = [parameter for spec, parameter in named if spec.name not in private]
        """This worker's parameters that clients share."""
        self._replica = replica
        # The first of several optimizers has them all.
        buffers = replica.model.named_buffers() if replica.is_first else ()
        self._buffer_names = [name for name, _ in buffers if name not in private]
        self.parameters = [nn.Parameter(parameter.detach().clone()) for parameter in self.trained]
        """The server's."""
        self._shared_buffers = clones(self._buffers)
        self._start = self._present
        self._past = Past()
        self.controls = [torch.zeros_like(parameter) for parameter in self.trained] if has_controls else []
        self._outer, self._optimizer, self._tell = outer, outer.optimizer(self.parameters), context.tell
        of_buffers = [
            TensorSpec(f"buffer.{index}", tuple(buffer.shape), real_dtype(buffer))
            for index, buffer in enumerate(self._shared_buffers)
        ]
        of_controls = [replace(spec, name=f"{_CONTROL}{spec.name}") for spec in specs] if has_controls else []
        of_client = [*specs, *of_buffers, *of_controls, TensorSpec("scale", (1,), torch.float64)]
        if guard is not None:
            of_client.append(TensorSpec("within", (1,), torch.float64))
        self._guard, self._hides = guard, guard is not None or masks is not None
        self._collective = context.collective
        self._clients, self._elsewhere, self._upload = context.clients, context.server, upload
        self._outgoing: tuple[list[Tensor], float] | None = None
        self._allows_nonfinite = allows_nonfinite
        of_changes = upload.specs(self.parameters) if upload is not None else specs
        self._num_of_changes, self._is_masked = len(of_changes), masks is not None
        of_rest = [] if self._is_masked else [*of_buffers, *of_controls]
        self._described = (
            [*specs, *of_buffers, *of_controls],
            [replace(spec, group=0) for spec in (*of_changes, *of_rest)],
        )
        if self._clients is not None:
            self._clients.describe(*self._described, current=lambda: self._state)
        self._rejecting = Rejecting(reject, context, self._model_with) if reject is not None else None
        self._joining = Joining(
            context,
            of_client,
            aggregator,
            num_changes=len(specs),
            masks=masks,
            rejecting=self._rejecting,
            guard=guard,
        )
        self._scales = Scales(are_counted=normalises)

    @property
    def upload_bytes(self) -> int:
        """What a client sends of a turn: its change, as it is encoded, and what it changed of buffers and controls."""
        changes = self.parameters
        coded = sum(change.nbytes for change in changes) if self._upload is None else self._upload.num_bytes(changes)
        return coded + sum(tensor.nbytes for tensor in (*self._real_buffers(), *self.controls))

    @property
    def _buffers(self) -> list[Tensor]:
        """This worker's buffers that clients share, where the model may have put other tensors. Raises UsageError."""
        if not self._buffer_names:
            return []
        named = dict(self._replica.model.named_buffers(remove_duplicate=False))
        for name in self._buffer_names:
            if name not in named:
                raise UsageError(
                    f"the model had a buffer {name!r} when it was prepared and has none now; keep it there"
                )
        return [named[name] for name in self._buffer_names]

    @property
    def _state(self) -> list[Tensor]:
        """What clients that are elsewhere are given."""
        return [*(parameter.detach() for parameter in self.parameters), *self._real_buffers(), *self.controls]

    def _real_buffers(self) -> list[Tensor]:
        return [buffer.to(real_dtype(buffer)) for buffer in self._shared_buffers]

    def begin(self, *, num_samples: int) -> None:
        """Before the first round: a client says to its server elsewhere how many samples it has."""
        assert self._elsewhere is not None
        self._elsewhere.attach(*self._described, samples=num_samples)

    @torch.no_grad()
    def send(self) -> None:
        """What a client's turn has come to, if to anything, leaves for the server elsewhere."""
        if self._outgoing is not None and self._elsewhere is not None:
            update, scale = self._outgoing
            self._elsewhere.send(update, scale=scale)
            self._outgoing = None

    @torch.no_grad()
    def next_turn(self) -> bool:
        """The server elsewhere says when a client's next turn begins. Returns whether there is none."""
        assert self._elsewhere is not None
        state = [torch.empty_like(tensor) for tensor in self._state]
        is_over = self._elsewhere.next_turn(state)
        overwrite([*self.parameters, *self._shared_buffers, *self.controls], state)
        return is_over

    def require_judge(self) -> None:
        """Raises UsageError, on all workers, where updates are judged and nothing judges them. Collective call."""
        if self._rejecting is not None and self._elsewhere is None:
            self._rejecting.require_judge()

    def take_up(self) -> None:
        """Before the first round: since it was prepared the script may have loaded weights. Of buffers the server has
        rank 0's. Collective call.

        Raises:
            TensorMismatch: workers have other parameters.
        """
        require_same(self._names, self.trained, self._collective, when="before the first round")
        overwrite([*self.parameters, *self._shared_buffers], [*self.trained, *self._buffers])
        if self._shared_buffers:  # statistics of a batch of one rank's own, as of a first forward pass
            copy_tensors_from_first(self._shared_buffers, self._collective)
            self.load()

    @property
    def _present(self) -> Version:
        return self.parameters, self._shared_buffers

    @property
    def anchors(self) -> Sequence[Tensor]:
        """The parameters with which this worker's turn began."""
        return self._start[0]

    def load(self, *, behind: int = 0) -> None:
        """A turn begins: this worker's model gets the server's values, as they were so many rounds ago."""
        self._start = self._past.before(self._present, rounds=behind)
        self._put(self._start)

    def _put(self, version: Version) -> None:
        parameters, buffers = version
        overwrite([*self.trained, *self._buffers], [*parameters, *buffers])

    @torch.no_grad()
    def changes(self) -> list[Tensor]:
        """What this worker's steps took off the parameters that they began with."""
        return [server - local for server, local in zip(self.anchors, self.trained, strict=True)]

    @torch.no_grad()
    def changes_of_buffers(self) -> list[Tensor]:
        """The same of buffers. Raises UsageError if one has another shape than when it was prepared."""
        return [
            change_of(name, server, local)
            for name, server, local in zip(self._buffer_names, self._start[1], self._buffers, strict=True)
        ]

    def first_nonfinite(self, changes: Sequence[Tensor]) -> str | None:
        """The name of a parameter, or buffer, whose change is not finite."""
        named = zip([*self._names, *self._buffer_names], changes, strict=False)
        return next((name for name, change in named if not is_finite(change)), None)

    @torch.no_grad()
    def contribute(
        self,
        client: int,
        changes: Sequence[Tensor],
        rest: Sequence[Tensor],
        *,
        weight: float,
        scale: float,
        round_number: int,
        coded: Sequence[Tensor] = (),
    ) -> None:
        """One client's part in the round.

        Args:
            rest: what the client changed of buffers, and what its own controls grew by.
            coded: what the changes travel as, where they are encoded.
            scale: changes are joined divided by it, and what comes of them counts times the joint of all scales.

        Raises:
            UsageError: a buffer was changed, which nothing hides.
        """
        if self._hides:
            self._require_unchanged(rest)
        if self._elsewhere is None:
            self._add(client, _divided(changes, scale), rest, weight=weight, scale=scale, round_number=round_number)
            return
        if self._guard is not None:
            *changes, _ = self._guard.outward(changes, client=client, round_number=round_number)
        self._outgoing = [*(coded or changes), *([] if self._is_masked else rest)], scale

    def _add(
        self,
        client: int,
        scaled: Sequence[Tensor],
        rest: Sequence[Tensor],
        *,
        weight: float,
        scale: float,
        round_number: int,
    ) -> None:
        """`rest` is what was changed of buffers and controls."""
        sent = [*rest, torch.tensor([scale], dtype=torch.float64, device=scaled[0].device)]
        if self._guard is not None:
            *scaled, within = self._guard.outward(scaled, client=client, round_number=round_number)
            sent.append(within)
        self._joining.add(Contribution(client, weight, "gradient", [*scaled, *sent]))

    @torch.no_grad()
    def _take(self, update: ClientUpdate, *, round_number: int) -> None:
        """What came from a client that is elsewhere. Raises ValueError, which says why, for what does not count."""
        device = self.parameters[0].device
        tensors = [tensor.to(device) for tensor in update.tensors]
        changes, rest = tensors[: self._num_of_changes], tensors[self._num_of_changes :]
        if self._upload is not None:
            client = update.client
            changes = self._upload.decoded(changes, self.parameters, client=client, round_number=round_number)
        self._scales.require(update.scale)
        changes = _divided(changes, update.scale)
        if not self._allows_nonfinite:
            if (name := self.first_nonfinite(changes)) is not None:
                raise ValueError(f"what it changed of {name!r} is not finite")
            if not all(map(is_finite, rest)):
                raise ValueError("what it changed of buffers or controls is not finite")
        if self._hides:
            self._require_unchanged(rest)
        weight, scale = update.weight, update.scale
        self._add(update.client, changes, rest, weight=weight, scale=scale, round_number=round_number)
        self._scales.add(scale, weight=weight)

    @torch.no_grad()
    def join(self, *, round_number: int, num_clients: int, leaves: bool, num_kept: int = 0) -> tuple[bool, bool]:
        """Step with what the round's clients contributed. Collective call.

        Args:
            num_clients: that there are, of which those of a round are a part.
            leaves: this worker takes part in no further round.
            num_kept: earlier rounds' models that the next one may ask for.

        Returns:
            Whether anybody contributed, and whether a worker leaves, so that there is no further round.
        """
        if self._clients is not None and not leaves:
            take = partial(self._take, round_number=round_number)
            leaves = self._clients.collect(round_number, take)
            if leaves:
                self._joining.clear()
                self._scales.clear()
                return False, True
        joined = self.joined(round_number=round_number, leaves=leaves)
        return self.step_with(joined, round_number=round_number, num_clients=num_clients, num_kept=num_kept)

    @torch.no_grad()
    def step_with(self, joined: Joined, *, round_number: int, num_clients: int, num_kept: int) -> tuple[bool, bool]:
        """Step with what the round has come to, and begin another one. As `join`, which says it before."""
        count, gradients, guard = joined.num_contributions, joined.gradients, self._guard
        # A round in which nobody took part looks like another; after the last one there is none.
        steps = count > 0 or (guard is not None and guard.steps_alone and not joined.is_last)
        if guard is not None and steps:
            num_changes = len(self.trained)
            gradients = guard.inward(gradients, num_changes=num_changes, num_summed=count, round_number=round_number)
        self._past.add(self._present, most=num_kept)
        if steps:
            self._step(gradients, share=count / num_clients)
        self._joining.clear()
        return count > 0, joined.is_last

    @torch.no_grad()
    def joined(self, *, round_number: int, leaves: bool, trained: tuple[int, int] = (0, 0)) -> Joined:
        """What the round's clients contributed, over all workers, which changes nothing yet. Collective call. As
        `Joining.join`."""
        try:
            joined = self._joining.join(round_number=round_number, leaves=leaves, trained=trained)
            if self._clients is not None and joined.num_contributions:
                if not self._allows_nonfinite and not all(map(is_finite, joined.gradients)):
                    raise UsageError("the sum of what clients changed is too large for numbers of its precision")
                if self._scales.are_counted:
                    joined.gradients[-1].fill_(self._scales.joint(self._clients.outweigh))
        except UsageError as error:
            if self._clients is None:
                raise
            self._clients.tell(f"the round changes nothing: {error}")
            self._joining.clear()
            joined = Joined([], 0, leaves)
        self._scales.clear()
        return joined

    def join_among(self, context: Context, *, comes: bool) -> None:
        """Rounds are joined with these from here on. Collective call. `comes`: this worker does, and its model is the
        server's."""
        self._collective = context.collective
        self._joining.join_among(context)
        if comes:
            overwrite([*self.parameters, *self._shared_buffers], [*self.trained, *self._buffers])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """This worker's model has the server's values meanwhile, and afterwards its own again."""
        local = [*self.trained, *self._buffers]
        own = clones(local)
        self._put(self._present)
        try:
            yield
        finally:
            overwrite(local, own)

    @contextmanager
    @torch.no_grad()
    def _model_with(self, changes: Sequence[Tensor]) -> Iterator[nn.Module]:
        """This worker's model has the server's values meanwhile, as they would be if these changes were all."""
        with self.in_place():
            remaining = iter(changes)
            for parameter, change in zip(self.trained, remaining, strict=False):
                parameter.sub_(change)
            for buffer, change in zip(self._buffers, remaining, strict=False):
                buffer.copy_(moved(buffer, change))
            yield self._replica.model

    def own_state(self) -> dict[str, OwnState]:
        """What is not in the global model; all workers have it alike."""
        state = {f"{OUTER}{name}": tensor for name, tensor in export_state(self._optimizer, self.parameters).items()}
        controls = {f"{_CONTROL}{index}": control for index, control in enumerate(self.controls)}
        guards = self._guard.own_state() if self._guard is not None else {}
        sent = self._joining.memory.own_state() if self._joining.memory is not None else {}
        past = self._past.own_state()
        return {name: OwnState(tensor, "same") for name, tensor in {**state, **controls}.items()} | guards | sent | past

    def restore(self, own: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave, as far as it is there; of another outer optimizer, no state."""
        if self._guard is not None:
            self._guard.restore(own)
        if self._joining.memory is not None:
            self._joining.memory.restore(own)
        import_state(self._optimizer, self.parameters, taken_up(self._outer, own, tell=self._tell))
        self._past.restore(own, num_parameters=len(self.parameters), num_buffers=len(self._shared_buffers))
        for index, control in enumerate(self.controls):
            if (saved := own.get(f"{_CONTROL}{index}")) is not None:
                control.copy_(saved)

    def close(self) -> None:
        if self._joining.memory is not None:
            self._joining.memory.close()

    def _require_unchanged(self, of_buffers: Sequence[Tensor]) -> None:
        """Raises UsageError if clients changed a buffer, which nothing hides."""
        for name, change in zip(self._buffer_names, of_buffers, strict=True):
            if change.any():
                raise UsageError(
                    f"what clients changed of parameters is hidden, and they changed the buffer {name!r} as well; use "
                    "layers without running statistics, such as GroupNorm for BatchNorm"
                )

    def _step(self, gradients: Sequence[Tensor], *, share: float) -> None:
        remaining = iter(gradients[:-1])
        scale = float(gradients[-1]) if self._scales.are_counted and gradients[-1] else 1.0
        for parameter, gradient in zip(self.parameters, remaining, strict=False):
            parameter.grad = (gradient if scale == 1.0 else gradient.mul_(scale)).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for buffer, gradient in zip(self._shared_buffers, remaining, strict=False):
            buffer.copy_(moved(buffer, gradient))
        for control, growth in zip(self.controls, remaining, strict=True):
            control.add_(growth, alpha=share)


def _divided(changes: Sequence[Tensor], scale: float) -> list[Tensor]:
    return list(changes) if scale == 1.0 else [change / scale for change in changes]
