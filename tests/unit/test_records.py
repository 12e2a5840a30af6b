"""Records and their files, the run's configuration, clock, seeds and checkpoints."""

from __future__ import annotations

import io
import math
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Checkpoint, WorkerState
from paceline.clock import TrainingClock
from paceline.config import DEFAULT_EVAL_EVERY, RunConfig, Target
from paceline.errors import UsageError
from paceline.records import (
    RECORD_TYPES,
    EvaluationRecord,
    EventRecord,
    MetricRecord,
    Record,
    RecordWriter,
    StepRecord,
    UpdateRecord,
    from_plain,
    read_records,
    record_path,
    summarise,
    to_plain,
    truncate,
)
from paceline.seeding import derive, preserved_random_state, random_state, seed_everything, set_random_state

# --- records --------------------------------------------------------------------------------------------------------

INTS = st.integers(-1, 2**40)
TIMES = st.integers(0, 10**12).map(lambda microseconds: microseconds / 1e6)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
PLAIN = st.recursive(st.none() | st.booleans() | INTS | FLOATS | TEXTS, lambda inner: st.lists(inner, max_size=3))
RECORDS: dict[type[Record], st.SearchStrategy[Any]] = {
    StepRecord: st.builds(
        StepRecord, INTS, INTS, INTS, TIMES, INTS, TIMES, TIMES, TIMES, moved_bytes=INTS, staleness=INTS, hidden_s=TIMES
    ),
    MetricRecord: st.builds(MetricRecord, INTS, INTS, INTS, FLOATS, TEXTS, FLOATS),
    UpdateRecord: st.builds(UpdateRecord, INTS, INTS, INTS, INTS, INTS),
    EvaluationRecord: st.builds(
        EvaluationRecord, INTS, FLOATS, INTS, st.dictionaries(TEXTS, FLOATS, max_size=3), FLOATS
    ),
    EventRecord: st.builds(EventRecord, TEXTS, TEXTS, INTS, FLOATS, st.dictionaries(TEXTS, PLAIN, max_size=3)),
}
STEP = StepRecord(1, 2, 3, 4.5, 6, 0.1, 0.2, 0.3, 700, 8, 0.05)
UPDATES = [UpdateRecord(0, iteration, 1, 2, 3) for iteration in range(1, 6)]
EVENTS = [EventRecord("ready", "run", iteration, 0.5, {"a": [1]}) for iteration in range(1, 6)]


def write(directory: Path, records: list[Any]) -> None:
    writer = RecordWriter(directory)
    writer.write(records)
    writer.close()


@pytest.mark.parametrize("record_type", RECORD_TYPES)
@given(data=st.data())
def test_records_read_back_as_written(
    record_type: type[Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("run")
    records = data.draw(st.lists(RECORDS[record_type], max_size=5))
    half = len(records) // 2
    write(directory, records[:half])
    write(directory, records[half:])  # another process goes on with the same files
    assert read_records(directory, record_type) == records
    for record in records:
        assert from_plain(to_plain(record)) == record


def test_records_reach_the_disk_at_flush(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.write([STEP, UPDATES[0], EVENTS[0]])
    writer.flush()
    assert read_records(tmp_path, StepRecord) == [STEP]
    assert read_records(tmp_path, UpdateRecord) == UPDATES[:1]
    assert read_records(tmp_path, EventRecord) == EVENTS[:1]
    assert read_records(tmp_path, MetricRecord) == []
    writer.close()
    header, row = record_path(tmp_path, StepRecord).read_text().splitlines()
    assert header.startswith("worker,step,iteration,time_s,")
    assert row == "1,2,3,4.500000,6,0.100000,0.200000,0.300000,700,8,0.050000"


def test_numbers_that_are_not_finite_survive(tmp_path: Path) -> None:
    write(tmp_path, [MetricRecord(0, 1, 1, 0.0, "loss", value) for value in (math.nan, math.inf, -math.inf)])
    write(tmp_path, [EvaluationRecord(1, 0.0, 1, {"loss": math.nan}, 0.0)])
    values = [record.value for record in read_records(tmp_path, MetricRecord)]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]
    assert math.isnan(read_records(tmp_path, EvaluationRecord)[0].metrics["loss"])


@pytest.mark.parametrize("records", [UPDATES, EVENTS], ids=["csv", "jsonl"])
def test_a_file_cut_off_anywhere_is_readable_and_can_be_appended_to(records: list[Any], tmp_path: Path) -> None:
    record_type = type(records[0])
    write(tmp_path, records)
    path = record_path(tmp_path, record_type)
    raw = path.read_bytes()
    for length in range(len(raw) + 1):
        path.write_bytes(raw[:length])
        survived = read_records(tmp_path, record_type)
        assert survived == records[: len(survived)]
        num_lines = raw[:length].count(b"\n")
        assert len(survived) == max(0, num_lines - (record_type is UpdateRecord))
        write(tmp_path, records[3:])
        assert read_records(tmp_path, record_type) == survived + records[3:]


def test_a_character_cut_in_two_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, [MetricRecord(0, 1, 1, 0.0, "größe", 1.0)])
    path = record_path(tmp_path, MetricRecord)
    path.write_bytes(path.read_bytes() + "0,1,1,0.0,grö".encode()[:-1])
    assert [record.name for record in read_records(tmp_path, MetricRecord)] == ["größe"]


@pytest.mark.parametrize(
    ("record_type", "line"),
    [
        (UpdateRecord, b"0,1,2\n"),
        (UpdateRecord, b"0,1,2,3,4,5\n"),
        (UpdateRecord, b"0,1,2,3,x\n"),
        (UpdateRecord, b"\xff\n"),
        (EventRecord, b'{"name": "ready"\n'),
        (EventRecord, b'{"name": "ready"}\n'),
        (EventRecord, b"[]\n"),
    ],
)
def test_a_damaged_line_is_reported_with_its_place(record_type: type[Any], line: bytes, tmp_path: Path) -> None:
    write(tmp_path, UPDATES[:2] + EVENTS[:2])
    path = record_path(tmp_path, record_type)
    path.write_bytes(path.read_bytes() + line)
    place = "entry 1" if b"\xff" in line else "entry 3"
    with pytest.raises(UsageError, match=rf"{record_type.kind}\.\w+: {place} is no record"):
        read_records(tmp_path, record_type)


def test_truncating_keeps_what_came_before(tmp_path: Path) -> None:
    write(tmp_path, [*UPDATES, *EVENTS, STEP])
    torn = record_path(tmp_path, UpdateRecord)
    torn.write_bytes(torn.read_bytes() + b"0,1,")
    truncate(tmp_path, iteration=3)
    assert read_records(tmp_path, UpdateRecord) == UPDATES[:3]
    assert read_records(tmp_path, EventRecord) == EVENTS[:3]
    assert read_records(tmp_path, StepRecord) == [STEP]
    write(tmp_path, UPDATES[4:])
    assert read_records(tmp_path, UpdateRecord) == [*UPDATES[:3], UPDATES[4]]
    truncate(tmp_path, iteration=0)
    assert [read_records(tmp_path, record_type) for record_type in (UpdateRecord, EventRecord, StepRecord)] == [[]] * 3
    assert not list(tmp_path.glob(".*")), "nothing else is left in the directory"


def test_truncating_a_damaged_directory_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, [*UPDATES, *EVENTS])
    record_path(tmp_path, EventRecord).write_bytes(b"nonsense\n")
    with pytest.raises(UsageError):
        truncate(tmp_path, iteration=1)
    assert read_records(tmp_path, UpdateRecord) == UPDATES


@pytest.mark.parametrize(
    "data", [[], ["steps"], ["steps", 1, 2], ["nothing", 1], [None], [[]], [{}, 1], [*to_plain(STEP), 1]]
)
def test_plain_data_that_is_no_record(data: list[Any]) -> None:
    with pytest.raises(ValueError, match="not a record"):
        from_plain(data)


def test_summarise() -> None:
    assert summarise({"accuracy": 0.95333, "loss": 17.0}) == "accuracy 0.9533, loss 17"


# --- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "metric", "value", "rising"),
    [
        ("accuracy=0.95", "accuracy", 0.95, True),
        ("accuracy>=0.95", "accuracy", 0.95, True),
        ("accuracy<=0.95", "accuracy", 0.95, False),
        ("loss=0.3", "loss", 0.3, False),
        ("loss>=0.3", "loss", 0.3, True),
        (" val_loss <= 3e-1 ", "val_loss", 0.3, False),
        ("Top5_Error=4", "Top5_Error", 4.0, False),
        ("perplexity=20", "perplexity", 20.0, False),
        ("rmse=1", "rmse", 1.0, False),
        ("val/mae=1", "val/mae", 1.0, False),
        ("test.wer=0.1", "test.wer", 0.1, False),
        ("val-nll=-2", "val-nll", -2.0, False),
        ("maestro=1", "maestro", 1.0, True),
        ("f1/macro=0.5", "f1/macro", 0.5, True),
        ("reward=-10", "reward", -10.0, True),
    ],
)
def test_targets(text: str, metric: str, value: float, rising: bool) -> None:
    target = Target.parse(text)
    assert target == Target(metric, value, rising)
    assert Target.parse(str(target)) == target
    assert target.is_reached(value)
    assert target.is_reached(value + 1) == rising
    assert target.is_reached(value - 1) != rising
    assert not target.is_reached(math.nan)


@pytest.mark.parametrize(
    "text",
    ["", "accuracy", "accuracy=", "=0.9", "accuracy=high", "accuracy==0.9", "accuracy>0.9", "9=9", "a b=1", "a=1 2"],
)
def test_texts_that_are_no_target(text: str) -> None:
    with pytest.raises(UsageError, match="is not of the form metric=value"):
        Target.parse(text)


@pytest.mark.parametrize("text", ["loss=nan", "loss<=-inf", "accuracy>=inf"])
def test_targets_that_can_never_be_reached(text: str) -> None:
    with pytest.raises(UsageError, match="can never be reached"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max-steps must be positive, not 0"),
        ({"max_steps": -5}, "max-steps"),
        ({"max_time_s": 0.0}, "max-time must be"),
        ({"max_time_s": math.nan}, "max-time must be"),
        ({"eval_every": 0}, "eval-every"),
        ({"checkpoint_every": -1}, "checkpoint-every"),
        ({"deadline_s": 0}, "deadline must be"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**63}, "seed must be in"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, not 'tpu'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunConfig(**settings)


def test_a_target_needs_evaluations() -> None:
    target = Target.parse("loss=1")
    assert RunConfig().eval_every is None
    assert RunConfig(target=target).eval_every == DEFAULT_EVAL_EVERY
    assert RunConfig(target=target, eval_every=7).eval_every == 7
    assert RunConfig(seed=2**63 - 1, max_time_s=0.5, device="cpu").max_time_s == 0.5


# --- clock ----------------------------------------------------------------------------------------------------------


def test_the_clock_leaves_pauses_out() -> None:
    now_s = 1000.0
    clock = TrainingClock(time_s=lambda: now_s)
    assert (clock.now_s, clock.is_running) == (0.0, False)
    now_s += 5
    assert clock.now_s == 0.0
    clock.resume()
    now_s += 2
    assert (clock.now_s, clock.is_running) == (2.0, True)
    clock.resume()  # changes nothing
    now_s += 1
    clock.pause()
    assert (clock.now_s, clock.is_running) == (3.0, False)
    now_s += 100
    clock.pause()
    assert clock.now_s == 3.0
    clock.resume()
    now_s += 0.5
    assert clock.now_s == 3.5


def test_the_clock_goes_on_from_a_checkpoint() -> None:
    now_s = 50.0
    clock = TrainingClock(time_s=lambda: now_s)
    clock.set(7.0)
    now_s += 3
    assert clock.now_s == 7.0
    clock.resume()
    now_s += 1
    assert clock.now_s == 8.0


def test_the_clock_runs_by_default() -> None:
    clock = TrainingClock()
    clock.resume()
    first = clock.now_s
    while clock.now_s == first:
        pass
    assert 0 <= first < clock.now_s < 60


# --- seeds ----------------------------------------------------------------------------------------------------------


def test_derived_seeds_are_the_same_on_any_machine() -> None:
    # printf 0/order/3 | b2sum -l 64, without its last bit
    assert derive(0) == 4761921975702974394
    assert derive(0, "order", 3) == 228291028133782092
    assert derive(1, "rank", 0) == 3817034369477551335


def test_derived_seeds_differ_and_fit() -> None:
    seeds = {derive(s, name, i) for s in range(5) for name in ("order", "rank") for i in range(50)}
    assert len(seeds) == 500
    assert all(0 <= seed < 2**63 for seed in seeds)


def draw() -> tuple[float, float, float, float]:
    return (torch.rand(1).item(), random.random(), random.gauss(0, 1), float(np.random.standard_normal()))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_one_seed_seeds_all(seed: int) -> None:
    with preserved_random_state():
        seed_everything(seed)
        first = draw()
        seed_everything(seed)
        assert draw() == first
        seed_everything((seed + 1) % 2**63)
        assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_random_state_is_plain_data_and_comes_back_whole() -> None:
    seed_everything(3)
    draw()  # leaves a second Gaussian number in store, in both generators
    buffer = io.BytesIO()
    torch.save(random_state(), buffer)
    expected = [draw() for _ in range(3)]
    set_random_state(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert [draw() for _ in range(3)] == expected


def fail_after_drawing() -> None:
    with preserved_random_state():
        seed_everything(99)
        draw()
        raise LookupError


def test_random_state_is_preserved_also_through_an_error() -> None:
    seed_everything(4)
    expected = draw()
    seed_everything(4)
    with pytest.raises(LookupError):
        fail_after_drawing()
    assert draw() == expected


# --- checkpoints ----------------------------------------------------------------------------------------------------

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


def test_a_changed_byte_is_refused_or_harmless() -> None:
    raw = CHECKPOINT.encode()
    refused = 0
    for place in random.Random(0).sample(range(len(raw)), 300):
        damaged = bytearray(raw)
        damaged[place] ^= 0x10
        decoded = decode_or_none(bytes(damaged))
        refused += decoded is None
        if decoded is not None:
            assert_same_checkpoint(decoded, CHECKPOINT)
    assert refused > 100


@pytest.mark.parametrize("where", ["weight", "optimizer"])
def test_a_changed_number_is_refused(where: str) -> None:
    raw = bytearray(CHECKPOINT.encode())
    tensor = CHECKPOINT.model["weight"] if where == "weight" else CHECKPOINT.optimizer["0.exp_avg"]
    raw[raw.index(tensor.numpy().tobytes()) + 101] ^= 1
    with pytest.raises(UsageError, match=r"here is no checkpoint, or a damaged one: the checksum of .* is wrong"):
        Checkpoint.decode(bytes(raw), where="here")


def test_a_checkpoint_cut_off_anywhere_is_refused() -> None:
    raw = CHECKPOINT.encode()
    for length in [0, 1, 3, *range(4, len(raw), 97), len(raw) - 1]:
        with pytest.raises(UsageError, match="here is no checkpoint"):
            Checkpoint.decode(raw[:length], where="here")


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
    torch.save({"format": 2}, buffer)
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
