"""Gradients that are reduced where they lie: what else a script does with that memory, in real processes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.horovod.conftest import SIZE
from tests.horovod.world import HorovodWorld

STEPS = 4
WIDTH = 300
"""A weight of 360 KB leaves by itself."""


def _model(seed: int, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = model(inputs).square().mean()
    return loss


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters() if parameter.grad is not None]


def _means(seed: int, step: int) -> list[Tensor]:
    """Over ranks, of a model that nobody has trained."""
    model = _model(seed)
    for rank in range(SIZE):
        (_loss(model, step, rank) / SIZE).backward()
    return _gradients(model)


@pytest.mark.parametrize("staying", [None, 0, 1])
def test_two_optimizers_of_the_same_names_keep_their_gradients(world: HorovodWorld, staying: int | None) -> None:
    for found, are_untouched in world.run(_alternate, staying):
        assert are_untouched
        for step, gradients in enumerate(found):
            for seed, those in enumerate(gradients):
                torch.testing.assert_close(those, _means(seed, step), rtol=1e-4, atol=1e-6)


def _alternate(rank: int, staying: int | None) -> Any:
    """Both models' gradients once both have been reduced. The gradients of one may stay from step to step, so that they
    do not move to where the other's are reduced."""
    import paceline.horovod.torch as hvd

    hvd.shutdown()  # no room is left of tests before
    hvd.init()
    models = [_model(seed) for seed in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0)) for model in models]
    found, are_untouched = [], True
    for step in range(STEPS):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            before = _gradients(models[1 - number])
            optimizer.zero_grad(set_to_none=number != staying)
            _loss(model, step, rank).backward()
            optimizer.synchronize()
            are_untouched &= all(map(torch.equal, before, _gradients(models[1 - number])))
        for optimizer in optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
        found.append([_gradients(model) for model in models])
    return found, are_untouched


def test_an_optimizer_that_waits_late_has_its_own_gradients(world: HorovodWorld) -> None:
    for found in world.run(_wait_late):
        for step, gradients in enumerate(found):
            for seed, those in enumerate(gradients):
                torch.testing.assert_close(those, _means(seed, step), rtol=1e-4, atol=1e-6)


def _wait_late(rank: int) -> Any:
    """The first model's gradients are reduced by the time the second one's are laid in the same room, and waited for
    only then."""
    import paceline.horovod.torch as hvd

    hvd.shutdown()
    hvd.init()
    models = [_model(seed) for seed in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0)) for model in models]
    found = []
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            for handle in optimizer._reducer._handles:
                while not hvd.poll(handle):
                    time.sleep(1e-3)
        for optimizer in optimizers:
            optimizer.step()
        found.append([_gradients(model) for model in models])
    return found


def test_a_rank_that_has_joined_keeps_its_gradients(world: HorovodWorld) -> None:
    for rank, (before, after) in enumerate(world.run(_join_early)):
        if rank == 0:
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        else:
            model = _model(0)
            for other in range(1, SIZE):  # the first one takes part with zeros
                (_loss(model, STEPS - 1, other) / SIZE).backward()
            torch.testing.assert_close(after, _gradients(model), rtol=1e-4, atol=1e-6)


def _join_early(rank: int) -> Any:
    """The first rank ends two steps before the others."""
    import paceline.horovod.torch as hvd

    hvd.init()
    model = _model(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    for step in range(STEPS - 2 * (rank == 0)):
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        optimizer.step()
    before = _gradients(model)
    hvd.join()
    return before, _gradients(model)


def test_an_optimizer_goes_on_after_a_new_init(world: HorovodWorld) -> None:
    for found in world.run(_begin_again):
        for step, gradients in enumerate(found):
            torch.testing.assert_close(gradients, _means(0, step), rtol=1e-4, atol=1e-6)


def _begin_again(rank: int) -> list[list[Tensor]]:
    import paceline.horovod.torch as hvd

    hvd.init()
    model = _model(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    found = []
    for step in range(STEPS):
        if step == STEPS // 2:
            hvd.shutdown()
            hvd.init()
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        optimizer.step()
        found.append(_gradients(model))
    return found


def test_what_finds_no_room_is_reduced_elsewhere(world: HorovodWorld) -> None:
    for found, num_rooms in world.run(_with_little_room):
        assert num_rooms == 1
        for step, gradients in enumerate(found):
            torch.testing.assert_close(gradients, _means(0, step), rtol=1e-4, atol=1e-6)


def _with_little_room(rank: int) -> Any:
    import paceline.horovod.torch as hvd
    from paceline.horovod import rooms
    from paceline.horovod.runtime import runtime

    hvd.shutdown()
    most_bytes, rooms._MOST_BYTES = rooms._MOST_BYTES, 4 * WIDTH * WIDTH + 64
    try:
        hvd.init()
        model = _model(0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            optimizer.step()
            found.append(_gradients(model))
        num_rooms = len(runtime().channel(0)._executor.rooms._rooms)
        hvd.shutdown()
    finally:
        rooms._MOST_BYTES = most_bytes
    return found, num_rooms


def test_neighbours_are_reduced_together() -> None:
    from paceline.comm.alone import AloneCollective
    from paceline.horovod.requests import ALLREDUCE, Member, Request
    from paceline.horovod.rooms import Rooms

    rooms = Rooms(AloneCollective())
    made = []
    for number, (dtype, op) in enumerate(
        [("float32", "mean"), ("float32", "mean"), ("float32", "sum"), ("bfloat16", "sum")]
    ):
        member = Member(str(number), dtype, (3, number + 1))
        room = rooms.make(Request(ALLREDUCE, str(number), (member,), op, has_room=True))
        assert room is not None
        assert room.given.views[0].shape == (3, number + 1)
        made.append(room)
    assert len(rooms.starts(made)) == 3
    assert len(rooms.starts([made[1], made[0]])) == 2
    assert rooms.make(Request(ALLREDUCE, "empty", (Member("empty", "float32", (0,)),), "mean", has_room=True)) is None
