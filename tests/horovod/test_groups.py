"""Groups and an optimizer's buckets, which are one operation of many tensors, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.horovod.world import HorovodWorld


def test_a_group_of_one_name_may_change_and_is_checked_each_time(world: HorovodWorld) -> None:
    for results, said in world.run(_change_a_group):
        assert results == [[[6.0] * 2, [6.0] * 3], [[6.0] * 3, [6.0] * 2], [[6, 6], [6.0] * 3], [[6.0] * 2, [6.0] * 3]]
        assert said == ["Tensor is required to be contiguous.", "takes dense tensors", ""]


def _change_a_group(rank: int) -> Any:
    import paceline.horovod.torch as hvd

    hvd.init()
    results = []
    for dtype, lengths in ((None, (2, 3)), (None, (3, 2)), (torch.int64, (2, 3)), (None, (2, 3))):
        group = [
            torch.full((lengths[0],), rank + 1, dtype=dtype or torch.float32),
            torch.full((lengths[1],), rank + 1.0),
        ]
        results.append([each.tolist() for each in hvd.grouped_allreduce_(group, op=hvd.Sum, name="changes")])
    said = []
    for odd in (torch.ones(4)[::2], torch.ones(2).to_sparse(), torch.ones(2)):
        try:
            hvd.grouped_allreduce([odd, torch.ones(3)], op=hvd.Sum, name="changes")
            said.append("")
        except ValueError as error:
            said.append(next(part for part in ("takes dense tensors", str(error)) if part in str(error)))
    return results, said


def test_a_script_may_change_its_list_while_the_group_is_under_way(world: HorovodWorld) -> None:
    assert world.run(_change_the_list) == [([[6.0, 6.0], [6.0]], [[6.0, 6.0], [6.0]])] * 3


def _change_the_list(rank: int) -> Any:
    import time

    import paceline.horovod.torch as hvd

    hvd.init()
    time.sleep(0.1 * rank)  # the others have to wait, and change their lists meanwhile
    group = [torch.full((2,), rank + 1.0), torch.full((1,), rank + 1.0)]
    new, place = list(group), [each.clone() for each in group]
    handles = [hvd.grouped_allreduce_async(new, op=hvd.Sum), hvd.grouped_allreduce_async_(place, op=hvd.Sum)]
    new.clear()
    place.append(torch.ones(7))
    return tuple([each.tolist() for each in hvd.synchronize(handle)] for handle in handles)


def test_what_differs_inside_a_group_or_a_bucket_is_named(world: HorovodWorld) -> None:
    for in_group, in_count, in_bucket in world.run(_differ):
        assert "'allreduce.differs_2of3': shape is [2] on rank 0 and [3] on rank 1" in in_group
        assert "'grouped_allreduce.counts': number of tensors is 1 on rank 0 and 2 on rank 1" in in_count
        assert "'allreduce.0.weight': shape is [2, 3] on rank 0 and [2, 4] on rank 1" in in_bucket


def _differ(rank: int) -> list[str]:
    import paceline.horovod.torch as hvd

    def group() -> None:
        hvd.grouped_allreduce([torch.ones(1), torch.ones(2 + rank), torch.ones(1)], name="differs")

    def count() -> None:
        hvd.grouped_allreduce([torch.ones(1)] * (1 + rank), name="counts")

    def bucket() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3 + rank, 2), torch.nn.Linear(2, 1))
        optimizer = _distributed(model)
        model(torch.ones(1, 3 + rank)).sum().backward()
        optimizer.step()

    hvd.init()
    said = []
    for differ in (group, count, bucket):
        try:
            differ()
        except hvd.HorovodInternalError as error:
            said.append(str(error))
    return said


def _distributed(model: torch.nn.Module, **about: Any) -> Any:
    import paceline.horovod.torch as hvd

    own = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return hvd.DistributedOptimizer(own, named_parameters=model.named_parameters(), **about)


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"sets_to_none": True},
        {"passes": 2},
        {"passes": 2, "sets_to_none": True},
        {"compressed": True},
        {"freezes": True, "sets_to_none": True},
        {"replaces": True, "passes": 2},
    ],
    ids=str,
)
def test_steps_equal_those_of_averaged_gradients(world: HorovodWorld, about: dict[str, bool]) -> None:
    """Whatever the script does to gradients that lie in a bucket; parameters of two dtypes, one of them never used."""
    for mine, naive in world.run(_step_beside_naive, about):
        for name, tensor in naive.items():
            tolerance = {"rtol": 1e-2, "atol": 1e-2} if about.get("compressed") else {}
            torch.testing.assert_close(mine[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


class _Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, dtype=torch.float64)
        self.scale, self.unused = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.ones(2, 2))
        self.conv = torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.conv(x.sum() * torch.ones(1, 2, 3, 3)).sum()
        return self.second((self.scale * self.first(x)).tanh().double()).square().sum() + image


def _step_beside_naive(rank: int, about: dict[str, Any]) -> Any:
    import paceline.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    model, naive = _Odd(), _Odd()
    naive.load_state_dict(model.state_dict())
    passes = about.get("passes", 1)
    compression = hvd.Compression.fp16 if about.get("compressed") else hvd.Compression.none
    optimizer = _distributed(model, backward_passes_per_step=passes, compression=compression)
    alone = torch.optim.SGD(naive.parameters(), lr=0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        if about.get("freezes"):
            for each in (model, naive):
                each.first.weight.requires_grad_(step % 2 == 0)
        for each in (optimizer, alone):
            each.zero_grad(set_to_none=about.get("sets_to_none", False))
        assert step == 0 or not about.get("sets_to_none") or all(each.grad is None for each in model.parameters())
        for number in range(passes):
            inputs = torch.randn(2, 3, generator=generator)
            for each in (model, naive):
                each(inputs).div(100).backward()
                if about.get("replaces") and number < passes - 1:  # before it is sent, as there are more passes to come
                    each.scale.grad, each.first.bias.grad = each.scale.grad * 2, each.first.bias.grad.detach()
        if about.get("replaces"):
            model.second.bias.grad = None  # after that: what was reduced comes back
        for name, parameter in naive.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = hvd.allreduce(gradient.contiguous(), name=f"naive {name}")
        optimizer.step()
        alone.step()
    return [{name: each.detach() for name, each in one.named_parameters()} for one in (model, naive)]


def test_gradients_stay_in_the_bucket_and_leave_during_backward(world: HorovodWorld) -> None:
    for is_kept, sent in world.run(_watch_buckets):
        assert is_kept
        assert sent == [1, 2, 3]  # weights under way as each layer's gradients come, the last layer's first


def _watch_buckets(rank: int) -> Any:
    import paceline.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))  # weights of a bucket each
    optimizer = _distributed(model)
    sent: list[int] = []
    weights = [bucket for bucket in optimizer._reducer._buckets if len(bucket.places) == 1]
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda _: sent.append(sum(each.is_sent for each in weights)))
    kept = []
    for _ in range(2):
        sent.clear()
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        kept.append([parameter.grad for parameter in model.parameters()])
    return all(one is other for one, other in zip(*kept, strict=True)), sent


def test_what_is_under_way_does_not_touch_gradients_after_it_is_forgotten(world: HorovodWorld) -> None:
    for gradient in world.run(_forget):
        assert gradient == [[2.0, 2.0]]  # the average of 1, 2 and 3


def _forget(rank: int) -> Any:
    import paceline.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = _distributed(model)
    for factor in (100.0, 1.0):
        optimizer.zero_grad(set_to_none=False)
        (model(torch.ones(1, 2)) * factor * (rank + 1)).sum().backward()
        if factor == 100.0:
            optimizer.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    assert model.weight.grad is not None
    return model.weight.grad.tolist()


def test_sparse_gradients_travel_beside_the_rest_of_their_bucket(world: HorovodWorld) -> None:
    for as_dense in (False, True):
        for found in world.run(_step_sparsely, as_dense):
            assert all(found), found


def _step_sparsely(rank: int, as_dense: bool) -> list[bool]:
    import paceline.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True), torch.nn.Linear(3, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(own, named_parameters=model.named_parameters(), sparse_as_dense=as_dense)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        model(torch.tensor([rank, 2])).sum().backward()
        optimizer.synchronize()
        gradient = model[0].weight.grad
        assert gradient is not None
        counts = torch.tensor([1 / 3, 1 / 3, 4 / 3, 0.0])  # the third rank counts the third row twice
        wanted = counts.view(4, 1) * model[1].weight.detach()
        found += [gradient.is_sparse, torch.allclose(gradient.to_dense(), wanted)]
        with optimizer.skip_synchronize():
            optimizer.step()
        found.append(torch.allclose(model[0].weight.detach(), before - wanted))
    return found
