"""Every public name takes what it takes in Horovod 0.28.1: parameters, their order, and their defaults."""

from __future__ import annotations

import inspect

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.horovod import runtime

SET = "process_set=global_process_set"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
ALLREDUCE = f"average=None, name=None, op=None, {SCALES}, {SET}"
COMPRESSED = f"average=None, name=None, compression=Compression.none, op=None, {SCALES}, {SET}"
SCATTER = f"name=None, op=Average, {SET}, {SCALES}"
COMPRESSED_SCATTER = f"name=None, compression=Compression.none, op=Average, {SET}, {SCALES}"

FUNCTIONS = {
    # Horovod passes on whatever `init` and `shutdown` are given; these are what takes it there.
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    **dict.fromkeys(
        (
            "is_initialized", "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank", "stop_timeline",
            "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built",
            "ddl_built", "ccl_built", "cuda_built", "rocm_built",
        ),
        "",
    ),
    "start_timeline": "file_path, mark_cycles=False",
    "allreduce": f"tensor, {COMPRESSED}",
    **dict.fromkeys(("allreduce_", "allreduce_async", "allreduce_async_"), f"tensor, {ALLREDUCE}"),
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    **dict.fromkeys(
        ("grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"), f"tensors, {ALLREDUCE}"
    ),
    "sparse_allreduce_async": f"tensor, name, op, {SET}",
    **dict.fromkeys(("allgather", "allgather_async"), f"tensor, name=None, {SET}"),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), f"tensors, name=None, {SET}"),
    **dict.fromkeys(
        ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"), f"tensor, root_rank, name=None, {SET}"
    ),
    **dict.fromkeys(("alltoall", "alltoall_async"), f"tensor, splits=None, name=None, {SET}"),
    "reducescatter": f"tensor, {COMPRESSED_SCATTER}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {COMPRESSED_SCATTER}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "join": "device=-1",
    "barrier": SET,
    **dict.fromkeys(("poll", "synchronize"), "handle"),
    **dict.fromkeys(("add_process_set", "remove_process_set"), "process_set"),
    "ProcessSet": "ranks_or_comm",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {SET}",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=Compression.none, "
    "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
    f"sparse_as_dense=False, {SET}",
}  # fmt: skip
VALUES = {"Average": 0, "Sum": 1, "Adasum": 2, "Min": 3, "Max": 4, "Product": 5}
OTHERS = {"Compression", "elastic", "HorovodInternalError", "SyncBatchNorm", "global_process_set"}

_NAMED = {id(hvd.global_process_set): "global_process_set", id(hvd.Compression.none): "Compression.none"}


def text_of(function: object) -> str:
    """As it is written, without annotations; defaults that have a name by that name."""
    assert callable(function)
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        shown = _NAMED.get(id(default), repr(default))
        if parameter.name == "op" and default == hvd.Average and default is not None:
            shown = "Average"
        is_star = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        assert not is_star
        parts.append(parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={shown}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_horovod_s(name: str) -> None:
    assert text_of(getattr(hvd, name)) == FUNCTIONS[name]


def test_no_public_name_is_left_out() -> None:
    assert set(hvd.__all__) == {*FUNCTIONS, *VALUES, *OTHERS}
    assert {name: getattr(hvd, name) for name in VALUES} == VALUES
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    own = text_of(torch.nn.modules.batchnorm._BatchNorm)  # whose Horovod's is, too, whatever torch gives it
    assert text_of(hvd.SyncBatchNorm) == own
    assert set(vars(hvd.Compression)) >= {"none", "fp16"}
    packed, context = hvd.Compression.fp16.compress(torch.ones(3))
    assert packed.dtype == torch.float16
    assert hvd.Compression.fp16.decompress(packed, context).dtype == torch.float32


def test_names_that_need_no_others_answer_alone() -> None:
    """A world of one, as under plain `python`; what is built can be asked before `init`."""
    assert not hvd.is_initialized()
    built = [hvd.mpi_built(), hvd.nccl_built(), hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built()]
    assert not any(built)
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()
    hvd.init()
    try:
        places = [hvd.rank(), hvd.local_rank(), hvd.cross_rank(), hvd.size(), hvd.local_size(), hvd.cross_size()]
        assert places == [0, 0, 0, 1, 1, 1]
        assert not hvd.mpi_threads_supported()
        assert hvd.join() == 0
        assert hvd.broadcast_object("word") == "word"
        hvd.shutdown()
        assert not hvd.is_initialized()
    finally:
        runtime.end()
