"""A worker's line to a launcher that lends it a lease: a real controller and a real line, and no run."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from paceline.elastic import Elastic
from paceline.engines.ray import control
from paceline.engines.ray.control import ControlLine
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.survival import Survival
from paceline.engines.striking import connections
from paceline.membership import Membership
from paceline.records import EventRecord, read_records

LEASE_S = 4.0


def turn_for(controller: Controller, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        controller.turn(timeout_s=0.05)


@pytest.mark.slow
def test_a_worker_ends_when_the_launcher_is_silent_and_not_while_it_waits_for_a_disk(tmp_path: Path) -> None:
    ended = threading.Event()
    controller = Controller(tmp_path, host="127.0.0.1", epoch=1, on_output=lambda who, line: None)
    line = ControlLine(
        controller.address,
        identity="worker-1",
        progress=lambda: 1,
        on_abort=lambda reason: None,
        on_lease_ended=ended.set,
    )
    controller.leases = {"worker-1": LEASE_S}
    turn_for(controller, 1.0)
    pulses, began_s = line._num_pulses, time.monotonic()
    turn_for(controller, 2.0)
    assert line._num_pulses - pulses < 20 * (time.monotonic() - began_s), "an answer is asked for again at once"
    controller._files._jobs.put(lambda: time.sleep(LEASE_S + 0.5))
    assert controller.finish_files(limit_s=60)
    assert not ended.is_set()
    assert ended.wait(60)
    line.close()
    controller.close()


def test_that_training_has_begun_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tells it may be the one who dies next."""
    monkeypatch.setattr(control, "_PULSE_S", 600.0)
    controller = Controller(tmp_path, host="127.0.0.1", epoch=1, on_output=lambda who, line: None)
    line = ControlLine(controller.address, identity="worker-0", progress=lambda: 1, on_abort=lambda reason: None)
    while "worker-0" not in controller.heard_s:
        controller.turn(timeout_s=0.05)
    line.emit(EventRecord("training", "run", 0, 0.0, {}))
    until_s = time.monotonic() + 60
    while controller.progress.phase != "training" and time.monotonic() < until_s:
        controller.turn(timeout_s=0.05)
    assert controller.progress.phase == "training"
    line.close()
    controller.close()


@pytest.mark.skipif(bool(connections.lack()), reason=connections.lack())
def test_a_line_that_breaks_loses_no_record_no_file_and_no_goodbye(tmp_path: Path) -> None:
    """Each arrives once, whenever the connection is cut."""
    controller = Controller(tmp_path, host="127.0.0.1", epoch=1, on_output=lambda who, line: None)
    line = ControlLine(controller.address, identity="worker-1", progress=lambda: 1, on_abort=lambda reason: None)
    port = int(controller.address.endpoint.rsplit(":", 1)[1])
    stops = threading.Event()

    def cut() -> None:
        while not stops.wait(0.05):
            connections.cut([ends for ends in connections.own_connections() if port in (ends[0][1], ends[1][1])])

    def speak() -> None:
        for number in range(8):
            line.emit(EventRecord("number", "worker-1", number, 0.0, {}))
            line.save("checkpoint.pt", bytes(2_000_000))
        line.close()

    threads = [threading.Thread(target=run) for run in (cut, speak)]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + 60
    while threads[1].is_alive() and time.monotonic() < until_s:
        controller.turn(timeout_s=0.05)
    stops.set()
    threads[0].join()
    assert "worker-1" in controller.gone
    controller.close()
    numbers = [event.iteration for event in read_records(tmp_path, EventRecord) if event.name == "number"]
    assert numbers == list(range(8))
    assert (tmp_path / "checkpoint.pt").stat().st_size == 2_000_000


def test_who_starts_on_another_host_has_a_lease_and_is_given_up_when_it_is_over(tmp_path: Path) -> None:
    """Those who train are given up after a deadline of silence, a third of that."""
    controller = Controller(tmp_path, host="127.0.0.1", epoch=1, on_output=lambda who, line: None)
    controller.progress.phase = "training"
    now_s = [1000.0]
    survival = Survival(
        Elastic(at_least=1, at_most=4, deadline_s=3.0),
        controller,
        membership=Membership.first(2),
        deadline_s=60.0,
        pids={"worker-0": 1, "worker-1": 2},
        elsewhere={"worker-1"},
        say=lambda line: None,
        clock=lambda: now_s[0],
    )

    def look_for(seconds: int) -> None:
        """Worker 1 is heard all the time, and nobody else."""
        for _ in range(2 * seconds):
            now_s[0] += 0.5
            controller.heard_s["worker-1"] = now_s[0]
            survival.end_silent()

    controller.gone.add("worker-0")
    controller.heard_s["worker-2"] = now_s[0]
    survival.add("worker-2", 3, is_here=False)
    for seconds, expelled in ((6, set()), (4, {"worker-2"})):
        look_for(seconds)
        assert controller.leases == {"worker-1": 9.0, "worker-2": 9.0}
        assert controller.expelled == expelled
    assert re.match(r"it was silent for 9\.5 s", survival.why("worker-2"))
    survival.end("worker-2")
    survival.end_silent()
    assert controller.leases["worker-2"] is None
    survival.add("worker-3", 4, is_here=False)  # which never says a word, and has a minute for the first one
    for seconds, expelled in ((55, {"worker-2"}), (10, {"worker-2", "worker-3"})):
        look_for(seconds)
        assert controller.expelled == expelled
    controller.close()
