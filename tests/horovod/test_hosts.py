"""One script on several hosts over ssh: who goes where, what reaches it, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import RunFailed, UsageError
from paceline.horovod.hosts import Host, fill, parse_hosts, places
from paceline.horovod.processes import Job, Ssh
from paceline.running.result import Result
from tests.ports import free_port

SCRIPT = """
import os, sys
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1)).sum().backward()
    optimizer.step()
total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name="ranks")
print(f"{os.environ['HOROVOD_HOSTNAME']}: rank {hvd.rank()} of {hvd.size()}, total {total.item():g}, {sys.argv[1:]}")
"""
SLEEP = "import os, sys, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n"
FAIL = "import os, sys, time\ntime.sleep(0 if os.environ['RANK'] == '1' else 600)\nsys.exit('no data here')\n"


def test_hosts_and_slots() -> None:
    assert parse_hosts(["a:2", " b ", "c:1"]) == [("a", 2), ("b", 1), ("c", 1)]
    for text, said in (("a:x", "is not of the form host:slots"), (":2", "not of the form"), ("a:0", "not of the form")):
        with pytest.raises(UsageError, match=said):
            parse_hosts([text])
    for text in ("-oProxyCommand=true", "a b"):
        with pytest.raises(UsageError, match="is no name of a host"):
            parse_hosts([text])
    with pytest.raises(UsageError, match="host a is named twice"):
        parse_hosts(["a:1", "b:2", "a:2"])


def test_ranks_fill_hosts_as_they_are_named() -> None:
    hosts = fill([Host("a", 3), Host("b", 2), Host("c", 4)], 6)
    assert hosts == ["a", "a", "a", "b", "b", "c"]
    found = places(hosts)
    assert [(about["RANK"], about["LOCAL_RANK"]) for about in found] == [
        (0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 0),
    ]  # fmt: skip
    assert [about["LOCAL_SIZE"] for about in found] == [3, 3, 3, 2, 2, 1]
    assert [about["CROSS_RANK"] for about in found] == [0, 0, 0, 1, 1, 2]
    assert [about["CROSS_SIZE"] for about in found] == [3, 2, 1, 3, 2, 3]
    with pytest.raises(UsageError, match="-np 10 is more than the 9 slots"):
        fill([Host("a", 3), Host("b", 2), Host("c", 4)], 10)


def test_how_hosts_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SSH", "ssh -F 'my config'")
    command = Ssh(port=22022, identity_file="key").command("far")
    assert command[:3] == ["ssh", "-F", "my config"]
    assert command[-6:-1] == ["-p", "22022", "-i", "key", "far"]
    assert command[-1].startswith("exec ")
    assert command[-1].endswith("-m paceline.horovod.remote")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which hosts of this machine's loopback are reached over a real sshd."""
    program = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]))
    if program is None or shutil.which("ssh") is None:
        pytest.skip("sshd is not installed (Debian: openssh-server), so ssh hosts are not tried")
    for name in ("host", "own"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "authorized").write_text((tmp_path / "own.pub").read_text())
    port = free_port()
    (tmp_path / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 0.0.0.0\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/authorized\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nAcceptEnv PYTHONPATH\n"
    )
    (tmp_path / "ssh.conf").write_text(
        f"Host *\n  Port {port}\n  IdentityFile {tmp_path}/own\n  UserKnownHostsFile {tmp_path}/known\n"
        "  StrictHostKeyChecking accept-new\n  SendEnv PYTHONPATH\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with open(tmp_path / "sshd.log", "w") as log:
        server = subprocess.Popen([program, "-D", "-e", "-f", str(tmp_path / "sshd.conf")], stderr=log)
    try:
        _wait_for(port, server, tmp_path / "sshd.log")
        yield {**os.environ, "PACELINE_SSH": f"ssh -F {tmp_path}/ssh.conf"}
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + 300
    while time.monotonic() < until_s:
        if server.poll() is not None:
            pytest.skip(f"sshd does not run here, so ssh hosts are not tried: {log.read_text().strip()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"sshd does not listen: {log.read_text()}")


def horovodrun(tmp_path: Path, text: str, *arguments: str) -> list[str]:
    script = tmp_path / "a script.py"
    script.write_text(text)
    paceline = str(Path(sys.executable).with_name("paceline"))
    return [paceline, "horovodrun", "-np", "2", "-H", "localhost:1,127.0.0.2:1", "python", str(script), *arguments]


@pytest.mark.slow
def test_a_script_on_this_host_and_over_ssh(ssh: dict[str, str], tmp_path: Path) -> None:
    command = horovodrun(tmp_path, SCRIPT, "--lr", "a $HOME; b")
    done = subprocess.run(command, env=ssh, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = "total 1, ['--lr', 'a $HOME; b']"
    assert f"[0]<stdout>:localhost: rank 0 of 2, {said}" in done.stdout
    assert f"[1]<stdout>:127.0.0.2: rank 1 of 2, {said}" in done.stdout
    assert "horovod is not installed: Paceline stands in for it" in done.stderr
    (directory,) = (tmp_path / "runs").iterdir()
    steps = sorted((each.worker, each.step) for each in Result(directory).steps)
    assert steps == [(rank, number) for rank in range(2) for number in (1, 2, 3)]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(ssh: dict[str, str], tmp_path: Path) -> None:
    began_s = time.monotonic()
    command = horovodrun(tmp_path, FAIL)
    done = subprocess.run(command, env=ssh, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "[1]<stderr>:ScriptExit: the script ended with sys.exit('no data here')" in done.stderr
    assert "rank 1 on 127.0.0.2 ended with status 1" in done.stderr
    assert time.monotonic() - began_s < 500  # and not the other's 600 s


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_is_left_when_the_launcher_ends(ssh: dict[str, str], tmp_path: Path, ending: signal.Signals) -> None:
    command = horovodrun(tmp_path, SLEEP)
    launcher = subprocess.Popen(command, env=ssh, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    launcher.send_signal(ending)
    launcher.wait(300)
    until_s = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    launcher.stdout.close()


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_named(ssh: dict[str, str], tmp_path: Path) -> None:
    from paceline.engines.scripting import read_script
    from paceline.horovod.launch import Launch

    (tmp_path / "train.py").write_text(SLEEP)
    script = read_script(tmp_path / "train.py", ())
    hosts = [Host("127.0.0.3", 1)]
    nowhere = Ssh(port=1)
    with pytest.raises(RunFailed, match=r"host 127.0.0.3 did not start a worker within 60 s: .*Connection refused"):
        Launch(Job(script, start_within_s=60.0), hosts, num_proc=1, ssh=nowhere).run()
