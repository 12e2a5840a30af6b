"""Hosts and settings as SageMaker tells them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import job_hosts
from paceline.engines.ray.tokens import jobs_token
from paceline.errors import UsageError
from paceline.scheduler import from_environment, sagemaker
from paceline.scheduler.sagemaker import Wanted, from_sagemaker, wanted

HOSTS = ["algo-2", "algo-1", "algo-3"]


def resources(**changed: object) -> dict[str, str]:
    told = {"current_host": "algo-2", "hosts": HOSTS, "network_interface_name": "eth0", **changed}
    return {"SM_RESOURCE_CONFIG": json.dumps(told), "SM_NUM_CPUS": "4", "TRAINING_JOB_NAME": "clicks"}


def test_all_hosts_take_the_same_for_the_first() -> None:
    allocations = [from_environment(resources(current_host=host)) for host in HOSTS]
    assert [allocation and allocation.hosts for allocation in allocations] == [("algo-1", "algo-2", "algo-3")] * 3
    assert [allocation and allocation.here for allocation in allocations] == [1, 0, 2]
    assert {allocation and allocation.cores for allocation in allocations} == {(4, 4, 4)}
    assert {allocation and allocation.meeting_port for allocation in allocations} == {6379}


def test_the_file_tells_where_no_variable_does(tmp_path: Path) -> None:
    assert from_sagemaker({}, tmp_path) is None
    (tmp_path / "resourceconfig.json").write_text(resources()["SM_RESOURCE_CONFIG"])
    allocation = from_sagemaker({}, tmp_path)
    assert allocation is not None
    assert allocation.hosts[allocation.here] == "algo-2"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SM_RESOURCE_CONFIG": "hosts"}, "SM_RESOURCE_CONFIG is no JSON"),
        ({"SM_RESOURCE_CONFIG": "[" * 100_000}, "SM_RESOURCE_CONFIG is no JSON"),
        ({"SM_RESOURCE_CONFIG": "[1]"}, "SM_RESOURCE_CONFIG is no JSON object"),
        (resources(hosts="algo-1"), "no list of names of hosts, but 'algo-1'"),
        (resources(hosts=["algo-1", "--address=stranger"]), "no list of names of hosts"),
        (resources(hosts=["algo-1", 2]), "no list of names of hosts"),
        (resources(hosts=[]), "no list of names of hosts"),
        (resources(current_host="algo-4"), "says that this is 'algo-4', and names algo-1, algo-2, algo-3"),
        (resources(current_host=None), "says that this is 'None'"),
        ({**resources(), "OMPI_COMM_WORLD_RANK": "0"}, "MPI has started this process"),
    ],
)
def test_what_is_told_wrongly_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_environment(environment)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sagemaker_parameter_server_enabled": True}, Wanted("parameter_server", "ps-asp:servers=3", 3)),
        (
            {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 4},
            Wanted("mpi", "all-reduce", 12),
        ),
        ({"sagemaker_mpi_enabled": "true"}, Wanted("mpi", "all-reduce", 3)),
        ({"sagemaker_parameter_server_enabled": False, "sagemaker_mpi_enabled": "false"}, None),
        ({}, None),
    ],
)
def test_settings_become_strategies(tmp_path: Path, settings: dict[str, object], expected: Wanted | None) -> None:
    assert wanted({"SM_FRAMEWORK_PARAMS": json.dumps(settings)}, 3, tmp_path) == expected
    in_file = {name: json.dumps(value) for name, value in settings.items()}
    (tmp_path / "hyperparameters.json").write_text(json.dumps(in_file))
    assert wanted({}, 3, tmp_path) == expected


@pytest.mark.parametrize("number", ["0", "-1", "many", "99999"])
def test_a_number_of_processes_that_is_none(tmp_path: Path, number: str) -> None:
    settings = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": number}
    with pytest.raises(UsageError, match=f"asks for '{number}' processes a host"):
        wanted({"SM_FRAMEWORK_PARAMS": json.dumps(settings)}, 3, tmp_path)


def test_the_command_line_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(quiet=True)
    assert job_hosts.asked(console, None, None) == ("all-reduce", 1)
    assert job_hosts.asked(console, "", 0) == ("", 0)  # which are refused, as an unset variable of a shell
    for name, value in resources().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", '{"sagemaker_parameter_server_enabled": true}')
    assert job_hosts.asked(console, None, None) == ("ps-asp:servers=3", 3)
    assert job_hosts.asked(console, "gossip", None) == ("gossip", 3)
    assert job_hosts.asked(console, None, 6) == ("ps-asp:servers=3", 6)
    assert job_hosts.asked(console, None, None, default="horovod") == ("ps-asp:servers=3", 3)
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", '{"sagemaker_mpi_enabled": true}')
    assert job_hosts.asked(console, None, None) == ("all-reduce", 3)
    assert job_hosts.asked(console, None, None, default="horovod") == ("horovod", 3)


@pytest.mark.parametrize("token", ["", "short"])
def test_a_secret_that_is_none(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(UsageError, match="give the job the environment variable RAY_AUTH_TOKEN"), jobs_token():
        pass


def test_a_real_job_looks_where_sagemaker_puts_its_files() -> None:
    assert Path("/opt/ml/input/config") == sagemaker.CONFIGURATION
