"""Checkpoints: what is written reads back, and nothing else is read."""

from __future__ import annotations

import io
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import Checkpoint, DamagedCheckpoint, WorkerState
from paceline.errors import UsageError

CHECKPOINT = Checkpoint(
    iteration=12,
    time_s=3.25,
    model={"weight": torch.arange(200.0).view(20, 10), "half": torch.ones(3, dtype=torch.bfloat16)},
    optimizer={"0.exp_avg": torch.linspace(0, 1, 50), "0.step": torch.tensor(12.0)},
    groups=[{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "nesterov": False}],
    workers=[WorkerState(3, 40, 1, 2, {"torch": torch.get_rng_state(), "python": [3, [1, 2], None]})],
    seed=5,
    extra={"scheduler": {"last_epoch": 3, "_last_lr": [0.1]}},
)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert type(one) is type(other)
        assert one == other


def assert_same_checkpoint(one: Checkpoint, other: Checkpoint) -> None:
    assert_same(
        {**vars(one), "workers": [vars(worker)["steps"] for worker in one.workers]},
        {**vars(other), "workers": [vars(worker)["steps"] for worker in other.workers]},
    )
    for mine, theirs in zip(one.workers, other.workers, strict=True):
        assert_same(vars(mine), vars(theirs))


def test_a_checkpoint_reads_back_as_written() -> None:
    assert_same_checkpoint(Checkpoint.decode(CHECKPOINT.encode(), where="here"), CHECKPOINT)


def decode_or_none(raw: bytes) -> Checkpoint | None:
    """None: refused as it should be."""
    try:
        return Checkpoint.decode(raw, where="here")
    except UsageError:
        return None


RAW = CHECKPOINT.encode()


@settings(max_examples=150)
@given(place=st.integers(0, len(RAW) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_refused_as_damage(place: int, bit: int) -> None:
    damaged = bytearray(RAW)
    damaged[place] ^= 1 << bit
    with pytest.raises(DamagedCheckpoint, match="here is no checkpoint, or a damaged one"):
        Checkpoint.decode(bytes(damaged), where="here")


def test_every_bit_of_the_seal_counts() -> None:
    """Where the archive's directory ends and the seal begins, a flip could make a file of an older version."""
    for place in range(len(RAW) - 150, len(RAW)):
        for bit in range(8):
            damaged = bytearray(RAW)
            damaged[place] ^= 1 << bit
            assert decode_or_none(bytes(damaged)) is None


@given(length=st.integers(0, len(RAW) - 1), rest=st.binary(max_size=3))
def test_a_torn_file_is_refused_as_damage(length: int, rest: bytes) -> None:
    torn = RAW[:length] + rest
    with pytest.raises(DamagedCheckpoint):
        Checkpoint.decode(torn if torn != RAW else RAW[:-1], where="here")


def unsealed(version: int) -> bytes:
    """As older versions wrote them."""
    buffer = io.BytesIO()
    torch.save({"format": version, **CHECKPOINT.plain()}, buffer)
    return buffer.getvalue()


def test_a_part_that_is_marked_as_a_directory_is_refused() -> None:
    """torch would read nothing of it, and leave its tensor with what was in memory before."""
    raw = bytearray(unsealed(2))
    raw[raw.rindex(b"archive/data/3") - 8] ^= 0x10
    with pytest.raises(DamagedCheckpoint, match="archive/data/3 is not as it was written"):
        Checkpoint.decode(bytes(raw), where="here")


def test_older_ones_are_read_and_their_changed_bytes_are_refused_or_harmless() -> None:
    raw = unsealed(2)
    assert_same_checkpoint(Checkpoint.decode(raw, where="here"), CHECKPOINT)
    refused = 0
    for place in random.Random(0).sample(range(len(raw)), 300):
        damaged = bytearray(raw)
        damaged[place] ^= 0x10
        decoded = decode_or_none(bytes(damaged))
        refused += decoded is None
        if decoded is not None:
            assert_same_checkpoint(decoded, CHECKPOINT)
    assert refused > 100
    with pytest.raises(DamagedCheckpoint, match="its checksum is missing"):
        Checkpoint.decode(unsealed(3), where="here")


@pytest.mark.parametrize("where", ["weight", "optimizer"])
def test_a_changed_number_is_refused(where: str) -> None:
    raw = bytearray(CHECKPOINT.encode())
    tensor = CHECKPOINT.model["weight"] if where == "weight" else CHECKPOINT.optimizer["0.exp_avg"]
    raw[raw.index(tensor.numpy().tobytes()) + 101] ^= 1
    with pytest.raises(UsageError, match="its bytes are not those that its checksum is of"):
        Checkpoint.decode(bytes(raw), where="here")


class Malice:
    """Unpickled freely it would raise, and say so."""

    executed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return execute, ()


def execute() -> None:
    Malice.executed = True


def test_malice_is_refused_and_not_executed() -> None:
    as_torch = io.BytesIO()
    torch.save({"format": 1, "workers": Malice()}, as_torch)
    legacy = io.BytesIO()
    torch.save({"format": 1, "workers": Malice()}, legacy, _use_new_zipfile_serialization=False)
    raws = [as_torch.getvalue(), legacy.getvalue(), pickle.dumps(Malice()), pickle.dumps({"format": 1, "x": Malice()})]
    for raw in raws:
        with pytest.raises(UsageError, match="here is no checkpoint"):
            Checkpoint.decode(raw, where="here")
    assert not Malice.executed
    torch.load(io.BytesIO(raws[0]), weights_only=False)
    assert Malice.executed, "it would have been executed"


@pytest.mark.parametrize("content", [[1], torch.zeros(2), {}, {"format": 1}, {"format": 1, "workers": [{"x": 1}]}])
def test_other_torch_files_are_refused(content: Any) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with pytest.raises(UsageError, match="here is no checkpoint"):
        Checkpoint.decode(buffer.getvalue(), where="here")


def test_another_format_is_named_so() -> None:
    buffer = io.BytesIO()
    torch.save({"format": 7}, buffer)
    with pytest.raises(UsageError, match="here is a checkpoint of another version of Paceline"):
        Checkpoint.decode(buffer.getvalue(), where="here")


def test_what_could_not_be_read_back_is_refused_when_it_is_written() -> None:
    with pytest.raises(UsageError, match="the state of 'sampler'"):
        replace(CHECKPOINT, extra={"fine": {}, "sampler": {"object": Malice()}}).encode()
    with pytest.raises(UsageError, match="the state of 'sampler'"):
        replace(CHECKPOINT, extra={"sampler": {"function": lambda: None}}).encode()
    with pytest.raises(UsageError, match="'rule' of the optimizer's group 1"):
        replace(CHECKPOINT, groups=[{"lr": 0.1}, {"rule": Path("x")}]).encode()


def test_a_learning_rate_that_numpy_computed_is_a_number() -> None:
    raw = replace(CHECKPOINT, groups=[{"lr": np.float64(0.25)}]).encode()
    assert_same(Checkpoint.decode(raw, where="here").groups[0], {"lr": 0.25})
