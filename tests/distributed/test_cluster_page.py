"""The commands of docs/cluster.md, as they stand there, on hosts of their own: with the token, and without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.namespaces import Host, Network
from tests.distributed.harness import TRAIN

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
TIMEOUT_S = 600.0
BY_CLIENT = "paceline run train.py --workers 2 --max-steps 5 --address ray://$FIRST:10001"
"""Through the server of Ray's client, which says whether it wants a token."""
BLOCKS = dict(re.findall(r"```bash (\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


class Machines:
    """Each with a home of its own; `first` has started Ray as the page says, with a token."""

    def __init__(self, net: Network, directory: Path) -> None:
        self.first, self.second, self.third = net.hosts
        self._directory = directory
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._net = replace(net, environment={"PATH": path, "RAY_TMPDIR": str(net.directory)})
        for host in net.hosts:
            (directory / host.name).mkdir()
            # Ray takes the address from which packets leave for elsewhere.
            subprocess.run(["ip", "-n", host.name, "route", "add", "default", "dev", "eth0"], check=True)
        shutil.copy(TRAIN, directory / "train.py")

    def home(self, host: Host) -> Path:
        return self._directory / host.name

    def do(self, host: Host, commands: str, *, first: Host | None = None) -> str:
        """What the commands print, the last of which succeeded.

        Raises:
            RuntimeError: one failed; the message holds what it said.
        """
        known = {"FIRST": (first or self.first).address, "HOME": str(self.home(host))}
        net = replace(self._net, environment={**self._net.environment, **known})
        all_cores = f"taskset --all-tasks --pid --cpu-list 0-{(os.cpu_count() or 1) - 1} $$ > /dev/null"
        script = f"{all_cores}\ncd {self._directory}\n{commands}"
        return net.run(host, ["bash", "-ec", script], timeout_s=TIMEOUT_S)

    def bring_token(self) -> None:
        theirs = self.home(self.second) / ".ray"
        theirs.mkdir(mode=0o700)
        shutil.copy2(self.home(self.first) / ".ray" / "auth_token", theirs)


@pytest.fixture
def machines(hosts: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)  # of the Ray that other tests use
    return Machines(hosts, tmp_path)


def test_with_the_token_and_without(machines: Machines) -> None:
    machines.do(machines.first, BLOCKS["first"])
    token = machines.home(machines.first) / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o077 == 0, "others can read the token"
    for commands in (BLOCKS["other"], BLOCKS["run"], BY_CLIENT):
        with pytest.raises(RuntimeError, match=r"(?i)token"):
            machines.do(machines.second, commands)
    with pytest.raises(RuntimeError, match="here is another, in the variable RAY_AUTH_TOKEN"):
        machines.do(machines.second, f"export RAY_AUTH_TOKEN={'0' * 64}\n{BLOCKS['run']}")
    machines.bring_token()
    machines.do(machines.second, BLOCKS["other"])
    said = machines.do(machines.first, BLOCKS["run"])  # the second's Ray has the first's files here, on one machine
    assert "2 host(s)" in said
    assert "Everything is in order." in said
    assert "5 (global updates)" in machines.do(machines.first, BY_CLIENT)


def test_a_cluster_without_a_token_is_used_only_if_that_is_said(machines: Machines) -> None:
    machines.do(machines.first, "RAY_AUTH_MODE=disabled ray start --head --port=6379")
    with pytest.raises(RuntimeError, match="asks for no token"):
        machines.do(machines.first, BLOCKS["run"])
    with pytest.raises(RuntimeError, match="asks for no token"):
        machines.do(machines.first, BY_CLIENT)
    insecure = BLOCKS["run"].replace("--address", "--insecure --address")
    assert "Everything is in order." in machines.do(machines.first, insecure)
