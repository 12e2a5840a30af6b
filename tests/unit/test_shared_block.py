"""What names a process's memory names that memory and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.comm.servers.line import Bell, BellAddress, WorkerLine
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.errors import PeerLost

NUM_BYTES = 4096


@pytest.fixture
def block() -> Iterator[SharedBlock]:
    block = SharedBlock.create(NUM_BYTES)
    yield block
    block.close()


def another_block(_: Path) -> int:
    return os.dup(SharedBlock.create(NUM_BYTES).address.fd)


def file_of_the_size(folder: Path) -> int:
    path = folder / "file"
    path.write_bytes(bytes(NUM_BYTES))
    return os.open(path, os.O_RDWR)


def fifo(folder: Path) -> int:
    """Opening it as memory would wait for a writer, or take the place of its reader."""
    path = folder / "fifo"
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def end_of_a_pipe(_: Path) -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_a_block_is_found_where_it_was_announced(block: SharedBlock) -> None:
    again = SharedBlock.open(block.address)
    block.tensor[7] = 42
    assert again.tensor[7] == 42
    again.close()


@pytest.mark.parametrize("other", [another_block, file_of_the_size, fifo, end_of_a_pipe])
def test_a_descriptor_that_is_used_again_is_recognised(
    block: SharedBlock, other: Callable[[Path], int], tmp_path: Path
) -> None:
    fd = other(tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerLost, match="no longer what process"):
        SharedBlock.open(replace(block.address, fd=fd))
    assert set(os.listdir("/proc/self/fd")) <= before  # what earlier tests left may be closed meanwhile
    os.close(fd)


def test_a_process_that_has_the_number_of_another_is_recognised(block: SharedBlock) -> None:
    """A child has everything at the same descriptors, but for this one block."""
    code = "import os,sys; fd = os.memfd_create('paceline'); os.dup2(fd, int(sys.argv[1])); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(block.address.fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(PeerLost, match="no longer what process"):
            SharedBlock.open(replace(block.address, pid=other.pid))
        other.communicate(b"\n")


@pytest.mark.parametrize("change", [{"pid": 4194305}, {"fd": 1 << 20}], ids=["no process", "no descriptor"])
def test_a_stale_address_is_recognised(block: SharedBlock, change: dict[str, int]) -> None:
    with pytest.raises(PeerLost, match="cannot open what process"):
        SharedBlock.open(replace(block.address, **change))


def test_another_nonce_or_size_is_refused(block: SharedBlock) -> None:
    for address in (replace(block.address, nonce=1), replace(block.address, num_bytes=2 * NUM_BYTES)):
        with pytest.raises(PeerLost):
            SharedBlock.open(address)


def test_a_bell_is_rung_only_if_it_is_that_bell() -> None:
    bell, other = Bell(), Bell()
    with pytest.raises(PeerLost, match="no longer what process"):
        WorkerLine(BellAddress(os.getpid(), other.address.fd, bell.address.inode))
    bell.close()
    other.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_block(block: SharedBlock) -> None:
    code = "import os,sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); os.open(sys.argv[1], os.O_RDWR)"
    path = f"/proc/{block.address.pid}/fd/{block.address.fd}"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr


def test_addresses_travel_as_numbers(block: SharedBlock) -> None:
    assert block.address.gathered(lambda tensor: [tensor, tensor]) == [block.address] * 2
    assert BlockAddress(1, 2, 3, 2**63 - 1).gathered(lambda tensor: [tensor])[0].nonce == 2**63 - 1
