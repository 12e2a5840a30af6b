"""The distributed optimizer and batch norm over all ranks, beside one process with all batches."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from tests.horovod.conftest import EVERYBODY, SIZE
from tests.horovod.world import HorovodWorld


def test_distributed_optimizer_equals_one_process_with_all_batches(world: HorovodWorld) -> None:
    for about in (
        {},
        {"groups": 2},
        {"backward_passes_per_step": 2},
        {"gradient_predivide_factor": 2.0},
        {"is_closed": True},
    ):
        found = world.run(_train, about)
        alone = _train_alone(about.get("backward_passes_per_step", 1))
        for state in found:
            torch.testing.assert_close(state, alone, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, about))


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def _loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def _train(rank: int, about: dict[str, Any]) -> dict[str, torch.Tensor]:
    import paceline.horovod.torch as hvd

    hvd.init()
    about = dict(about)
    has_closure = about.pop("is_closed", False)
    model = _model()
    if rank:
        torch.nn.init.zeros_(model[0].weight)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(own, 2, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(own, named_parameters=model.named_parameters(), **about)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    passes = about.get("backward_passes_per_step", 1)
    for step in range(4):
        optimizer.zero_grad()
        for number in range(passes):
            loss = _loss(model, _batch(step * passes + number, rank)) / passes
            loss.backward()
        if has_closure:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        schedule.step()
    return model.state_dict()


def _train_alone(passes: int) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(4):
        optimizer.zero_grad()
        for number, rank in itertools.product(range(passes), EVERYBODY):
            (_loss(model, _batch(step * passes + number, rank)) / passes / SIZE).backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


def test_batch_norm_over_all_ranks_equals_one_process(world: HorovodWorld) -> None:
    whole = torch.cat([_batch(0, rank)[0] for rank in EVERYBODY]).requires_grad_()
    alone = torch.nn.BatchNorm1d(4)
    alone(whole).square().sum().backward()
    assert whole.grad is not None
    for rank, (gradient, mean, variance) in enumerate(world.run(_normalise)):
        torch.testing.assert_close(gradient, whole.grad[rank * 6 : rank * 6 + 6], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean, alone.running_mean)
        torch.testing.assert_close(variance, alone.running_var)


def _normalise(rank: int) -> tuple[Any, ...]:
    import paceline.horovod.torch as hvd

    hvd.init()
    layer = hvd.SyncBatchNorm(4)
    inputs = _batch(0, rank)[0].requires_grad_()
    layer(inputs).square().sum().backward()
    return inputs.grad, layer.running_mean, layer.running_var


def test_sparse_gradients_are_refused_in_groups(world: HorovodWorld) -> None:
    for said in world.run(_sparse_in_a_group):
        assert "sparse ones are not reduced in groups" in said


def _sparse_in_a_group(rank: int) -> str:
    import paceline.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), groups=1)
    try:
        model(torch.tensor([1, 2])).sum().backward()
    except ValueError as error:
        return str(error)
    return ""


def test_a_gradient_that_the_script_keeps_stays_as_it_was(world: HorovodWorld) -> None:
    for found in world.run(_keep_gradients):
        for step, (gradient, part) in enumerate(found):
            mean = step + 1 + (SIZE - 1) / 2  # of the ranks' inputs
            torch.testing.assert_close(gradient, torch.full((2, 3), mean))
            torch.testing.assert_close(part, torch.full((3,), mean))


def _keep_gradients(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each step's gradient, and a part of it that shares its memory."""
    import paceline.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    gradients, parts = [], []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step + 1 + rank))).sum().backward()
        optimizer.step()
        gradient = model.weight.grad
        assert gradient is not None
        parts.append(gradient.detach()[0])
        if step != 1:  # of this one a part alone is kept
            gradients.append(gradient)
        else:
            gradients.append(gradient.clone())
        del gradient
    return list(zip(gradients, parts, strict=True))
