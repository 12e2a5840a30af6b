"""A script's model and optimizer, checked and described for a strategy."""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from paceline.comm.arguments import flatten, shares_places
from paceline.comm.base import Collective
from paceline.errors import TensorMismatch, UsageError
from paceline.layout import TensorSpec
from paceline.nn.sharded_embedding import ShardedEmbedding
from paceline.server.optimizer import build_optimizer
from paceline.server.spec import OptimizerSpec


@dataclass(frozen=True)
class Replica:
    """A worker's model and optimizer, and how their parameters are called."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: tuple[nn.Parameter, ...]
    """The parameters that the optimizer updates and that require gradients, in the order of its groups."""
    specs: tuple[TensorSpec, ...]
    optimizer_spec: OptimizerSpec
    is_first: bool = True
    """Whether it is for the first of the run's optimizers, which stands also for what none of them trains: buffers, and
    other parameters."""
    beside: frozenset[int] = frozenset()
    """Parameters that the run's other optimizers train, by `id`."""
    by_rows: frozenset[int] = frozenset()
    """The places, among the parameters, of those whose rows move, and not the whole."""

    @functools.cached_property
    def moved_specs(self) -> tuple[TensorSpec, ...]:
        """What moves in flat memory: of parameters that move by rows, nothing."""
        return tuple(
            replace(spec, shape=(0,)) if index in self.by_rows else spec for index, spec in enumerate(self.specs)
        )

    @property
    def is_of_rows(self) -> bool:
        """Whether rows move of all parameters."""
        return len(self.by_rows) == len(self.parameters)

    @property
    def buffers(self) -> list[Tensor]:
        """The model's, if this replica stands for them."""
        return list(self.model.buffers()) if self.is_first else []

    @property
    def untrained(self) -> list[Tensor]:
        """What no optimizer trains and the script may change, if this replica stands for it: buffers, and parameters
        such as a teacher's."""
        trained = self.beside.union(map(id, self.parameters))
        return [*(p for p in self.all_parameters if id(p) not in trained), *self.buffers]

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """The optimizer's, and those that no optimizer trains if this replica stands for them."""
        own = [each for _, each in named_parameters_of(self.model)] if self.is_first else self.parameters
        return [parameter for parameter in own if id(parameter) not in self.beside]

    @functools.cached_property
    def tables(self) -> tuple[ShardedEmbedding, ...]:
        """The tables, whose rows are no parameters, if this replica stands for what is not the optimizer's."""
        modules = self.model.modules() if self.is_first else ()
        return tuple(module for module in modules if isinstance(module, ShardedEmbedding))

    @functools.cached_property
    def group_sizes(self) -> list[int]:
        """How many of the parameters were prepared in each of the optimizer's groups, up to the last with any."""
        groups = [spec.group for spec in self.specs]
        return [groups.count(group) for group in range(max(groups) + 1)]

    @functools.cached_property
    def is_real_on_cpu(self) -> bool:
        """Whether the parameters are real numbers on the CPU."""
        return all(parameter.is_cpu and parameter.is_floating_point() for parameter in self.parameters)


_PLAIN = (bool, int, float, str, type(None))
"""What of an optimizer's attributes can be compared."""

# An update of one element depends on that element alone, so that servers may cut a tensor anywhere.
_ELEMENT_WISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"}
)


def named_parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All that its modules have, also where the model's own `parameters()` leaves some out."""
    return nn.Module.named_parameters(model)


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> Replica:
    """Name the parameters that the optimizer updates. Raises UsageError if the optimizer holds a parameter that is
    not the model's, or none that can be trained."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"prepare takes a torch.nn.Module, not {type(model).__name__}")
    scripted = next(
        (name for name, each in model.named_modules() if isinstance(each, torch.jit.RecursiveScriptModule)), None
    )
    if scripted is not None:
        raise UsageError(
            f"the module {scripted or 'itself'!r} is of torch.jit.script, which takes no hooks; prepare the module "
            "that it was made from, and make it fast with torch.compile"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"prepare takes a torch.optim.Optimizer, not {type(optimizer).__name__}; if that has one inside, give "
            "prepare the one inside, which stays the same object, and go on stepping the outer one"
        )
    _refuse_tensors_without_values(model)
    names = {id(parameter): name for name, parameter in named_parameters_of(model)}
    parameters: list[nn.Parameter] = []
    specs: list[TensorSpec] = []
    for group, settings in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(settings["params"]):
            if id(parameter) not in names:
                raise UsageError(
                    f"parameter {position} of the optimizer's group {group} is not the model's; make the optimizer "
                    "from model.parameters() after the model is on its device, and give prepare every module whose "
                    "parameters it has, by name, such as a loss: prepare(model=..., loss=..., optimizer=..., data=...)"
                )
            if parameter.requires_grad:
                parameters.append(parameter)
                shape, dtype = tuple(parameter.shape), parameter.dtype
                specs.append(TensorSpec(names[id(parameter)], shape, dtype, group))
    if not parameters:
        raise UsageError("the optimizer has no parameter that requires a gradient")
    _refuse_duplicates(specs)
    return Replica(model, optimizer, tuple(parameters), tuple(specs), spec_of(optimizer))


def require_same_tensors(replica: Replica, collective: Collective) -> None:
    """Raises TensorMismatch on every rank, naming the first rank and tensor unlike rank 0's. Collective call."""
    mine = [f"{spec.name} of shape {list(spec.shape)} and {spec.dtype}" for spec in replica.specs]
    trained = {spec.name for spec in replica.specs}
    tensors = (*named_parameters_of(replica.model), *replica.model.named_buffers())
    mine += [f"{name} of shape {list(t.shape)} and {t.dtype}" for name, t in tensors if name not in trained]
    everyone = collective.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        for index, (first, other) in enumerate(zip_longest(everyone[0], theirs, fillvalue="nothing")):
            if first != other:
                raise TensorMismatch(f"parameter {index} differs: rank 0 has {first}, rank {rank} has {other}")


def _is_distributed() -> bool:
    """Whether the script has made torch's own processes meet."""
    return distributed.is_available() and distributed.is_initialized()


def require_joint_changes(model: nn.Module, *, averages_gradients: bool) -> None:
    """Raises UsageError for a layer that does with a worker's own batch what one process would do with all batches: it
    changes its weights in forward(), counts rows, or asks for statistics of all workers."""
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.max_norm is not None and module.weight.requires_grad:
            raise UsageError(
                f"{name!r} has max_norm={module.max_norm}, by which each worker changes the weights that its own "
                "batch uses; leave it out and bound the norm after optimizer.step(), or use the strategy single"
            )
        if is_embedding and module.scale_grad_by_freq and module.weight.requires_grad and averages_gradients:
            raise UsageError(
                f"{name!r} has scale_grad_by_freq=True, by which each worker divides gradients by how often its own "
                "batch uses a row, before they are averaged; leave it out, and divide the rows of weight.grad between "
                "loss.backward() and optimizer.step() by what worker.all_reduce makes of each worker's counts"
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training and not _is_distributed():
            raise UsageError(
                f"{name!r} is a SyncBatchNorm, which meets over torch.distributed, and a run of Paceline has none: it "
                "would normalise each worker's batch by itself; say so with nn.BatchNorm1d, 2d or 3d, or take a layer "
                "that normalises each sample, such as nn.GroupNorm"
            )


def copy_from_first(model: nn.Module, collective: Collective) -> None:
    """Give every rank rank 0's parameters and buffers, which are alike. Collective call.

    Raises:
        UsageError: one has several elements in one place.
    """
    named = (*named_parameters_of(model), *model.named_buffers())
    for name, tensor in named:
        if shares_places(tensor):
            raise UsageError(
                f"elements of {name!r}, of shape {list(tensor.shape)}, share memory, as after expand(); give the model "
                "a clone() of it"
            )
    copy_tensors_from_first([tensor.detach() for _, tensor in named], collective)


def copy_tensors_from_first(tensors: Sequence[Tensor], collective: Collective) -> None:
    """Give every rank rank 0's, one at least, as one tensor. Collective call."""
    flats = [flatten(tensor, device_type=tensor.device.type, is_target=True) for tensor in tensors]
    own = [flat.view(torch.uint8) for flat, _ in flats]
    whole = torch.cat(own)
    collective.broadcast(whole)
    for mine, first, (_, copy_back) in zip(own, whole.split([mine.numel() for mine in own]), flats, strict=True):
        mine.copy_(first)
        if copy_back is not None:
            copy_back()


def require_same_parameters(replica: Replica) -> None:
    """Look whether the optimizer still updates the parameters that it was prepared with, or some of them. Raises
    UsageError if others were added, unfrozen or put in their place since: their gradients would not be exchanged."""
    if _holds_exactly(replica):
        return
    trained = [p for group in replica.optimizer.param_groups for p in group["params"] if p.requires_grad]
    if len(trained) == len(replica.parameters) and all(map(operator.is_, trained, replica.parameters)):
        return
    known = set(map(id, replica.parameters))
    strange = [parameter for parameter in trained if id(parameter) not in known]
    if strange:
        names = {id(parameter): repr(name) for name, parameter in named_parameters_of(replica.model)}
        raise UsageError(
            f"the optimizer trains parameter {names.get(id(strange[0]), 'that is not of the model')}, of shape "
            f"{list(strange[0].shape)}, which it did not when it was prepared; add, replace and unfreeze parameters "
            "before prepare (one that was trained then may be frozen and unfrozen)"
        )


def require_all_parameters(replica: Replica) -> None:
    """As `require_same_parameters`; none may be left out either, or be in another group, as servers go on to update it
    with that group's settings."""
    groups = replica.optimizer.param_groups
    if _holds_exactly(replica) and [len(group["params"]) for group in groups] == replica.group_sizes:
        return
    require_same_parameters(replica)
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    for parameter, spec in zip(replica.parameters, replica.specs, strict=True):
        if (now := group_of.get(id(parameter), spec.group)) != spec.group:
            raise UsageError(
                f"parameter {spec.name!r} is in the optimizer's group {now} now and was in group {spec.group} when it "
                "was prepared, whose settings the servers use; group parameters before prepare, or use all-reduce"
            )
    held = sum(len(group["params"]) for group in replica.optimizer.param_groups)
    if held >= len(replica.parameters):
        return
    left = {id(parameter) for group in replica.optimizer.param_groups for parameter in group["params"]}
    name = next(spec.name for p, spec in zip(replica.parameters, replica.specs, strict=True) if id(p) not in left)
    raise UsageError(
        f"the optimizer has no parameter {name!r} any more, which servers go on to update; leave it out before "
        "prepare, or use all-reduce"
    )


def _holds_exactly(replica: Replica) -> bool:
    """Whether the optimizer holds the parameters that it was prepared with, in their order, and no frozen ones beside.
    This is the usual case, in which nothing else is to be looked at."""
    groups = replica.optimizer.param_groups
    held = groups[0]["params"] if len(groups) == 1 else [each for group in groups for each in group["params"]]
    return len(held) == len(replica.parameters) and all(map(operator.is_, held, replica.parameters))


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Plain values that the script's own kind of optimizer has as attributes, on which its step may depend. None for
    torch's kinds."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return None
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN) and name[0] != "_"}


def require_same_attributes(optimizer: torch.optim.Optimizer, before: dict[str, Any] | None) -> None:
    """Raises UsageError if the script has given the optimizer other attributes, of which servers know nothing."""
    if before is not None and (now := own_attributes(optimizer)) != before:
        name = next(name for name in {**before, **(now or {})} if before.get(name) != (now or {}).get(name))
        raise _unknown_to_servers(optimizer, name)


def _unknown_to_servers(optimizer: torch.optim.Optimizer, name: str) -> UsageError:
    kind, value = type(optimizer).__name__, getattr(optimizer, name, None)
    return UsageError(
        f"servers cannot build {kind} from its own settings: its attribute {name!r} is {value!r} here and would be "
        "another there; keep it in the optimizer's param_groups, or use all-reduce"
    )


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Each group's settings without its parameters; tensors of one element as numbers."""
    return tuple(_settings(group) for group in optimizer.param_groups)


def is_skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has found that this step's gradients are not finite and leaves it to the optimizer to skip.

    It does so for optimizers that unscale gradients themselves (fused ones); of others it does not call `step`.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def require_plain_steps(replica: Replica) -> None:
    """Raises UsageError for optimizers whose step needs more than the gradients, which servers cannot give."""
    optimizer = replica.optimizer
    kind = type(optimizer).__name__
    require_no_hooks(optimizer)
    spec = replica.optimizer_spec
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise UsageError(
            f"the script has put another function in the place of {kind}.step, which servers cannot call; do what it "
            "does between backward() and step(), or use all-reduce"
        )
    try:
        samples = [[torch.zeros(2, requires_grad=True)] for _ in spec.groups]
        built = build_optimizer(spec.optimizer_class, spec.defaults, spec.groups, samples)
    except Exception as error:
        raise UsageError(f"servers cannot build {kind} from its own settings ({error}); use all-reduce") from error
    known = _known_attributes()
    kept = next((name for name, value in vars(optimizer).items() if name not in known and _holds_state(value)), None)
    if kept is not None:
        raise UsageError(
            f"servers cannot build {kind} from its own settings: its attribute {kept!r} holds tensors or another "
            "optimizer, of which they would have others; keep them in optimizer.state, or use all-reduce"
        )
    mine, theirs = own_attributes(optimizer) or {}, own_attributes(built) or {}
    for name, value in mine.items():
        if name not in theirs or theirs[name] != value:
            raise _unknown_to_servers(optimizer, name)


def _known_attributes() -> frozenset[str]:
    """The attributes of every optimizer."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


def _holds_state(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_state, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_state, value))
    return isinstance(value, Tensor | torch.optim.Optimizer)


def require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError if the optimizer has step hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        kind = type(optimizer).__name__
        raise UsageError(f"{kind} has step hooks, which servers cannot call; remove them or use all-reduce")


def may_evaluate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer calls a closure when, and as often as, it likes: torch's own call it once, at first."""
    return isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim")


def cannot_evaluate(optimizer: torch.optim.Optimizer) -> UsageError:
    """The error of a strategy under which an optimizer cannot evaluate the model itself."""
    return UsageError(
        f"{type(optimizer).__name__} evaluates the model itself, perhaps several times a step, which this strategy "
        "does not allow; use all-reduce or single, or call backward() before step() and give it no closure"
    )


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError for an optimizer that cannot do without a closure."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise cannot_evaluate(optimizer)


def require_dense_steps(replica: Replica) -> None:
    """Raises UsageError for an optimizer that takes sparse gradients alone, where workers exchange a whole one."""
    if not isinstance(replica.optimizer, torch.optim.SparseAdam):
        return
    whole = next((spec.name for index, spec in enumerate(replica.specs) if index not in replica.by_rows), None)
    if whole is not None:
        raise UsageError(
            f"SparseAdam takes sparse gradients alone, and workers exchange the whole one of {whole!r}; use SGD or "
            "Adagrad, whose steps are the same for both, nn.Embedding(sparse=True) under all-reduce or ps-* without "
            "codec, aggregate, replicas and --elastic, or paceline.nn.ShardedEmbedding(optimizer='adam')"
        )


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """What servers need to build it anew."""
    kind = type(optimizer)
    is_element_wise = kind.__name__ in _ELEMENT_WISE and kind.__module__.startswith("torch.optim")
    return OptimizerSpec(kind, _settings(optimizer.defaults), hyperparameters(optimizer), is_element_wise)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.item() if isinstance(value, Tensor | np.generic) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _refuse_tensors_without_values(model: nn.Module) -> None:
    """Raises UsageError for tensors that cannot be given to other workers, or saved."""
    for name, tensor in (*named_parameters_of(model), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(f"{name!r} has no shape yet, since its layer is lazy; call the model once before prepare")
        if tensor.is_meta:
            raise UsageError(f"{name!r} is on the device meta and has no values; give it some before prepare")
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{name!r} is a {tensor.layout} tensor, which a model cannot be saved with; keep it as a plain "
                "attribute of its module, or make it dense"
            )


def _refuse_duplicates(specs: list[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"parameter {name!r} is in the optimizer twice, and would be updated twice a step; leave it out of one "
                "of the groups"
            )
