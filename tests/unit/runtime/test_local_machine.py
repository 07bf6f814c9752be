"""The real machine: what it starts and cannot own is not left behind."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from supervisor.process import (
    ExitWatcher,
    Marker,
    ProcessHandle,
    ProcessId,
    ProcessNotReadableError,
    is_same,
)
from supervisor.process.spawn import Child
from supervisor.runtime.machine import LocalMachine


@pytest.fixture
async def machine() -> LocalMachine:
    return LocalMachine(ExitWatcher())


async def test_a_child_that_nobody_can_own_is_ended_and_its_descriptor_closed(
    machine: LocalMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    born: list[Child] = []

    def refuse(child: Child) -> ProcessHandle:
        born.append(child)
        raise ProcessNotReadableError(child.process.pid, OSError(24, "Too many open files"))

    monkeypatch.setattr(ProcessHandle, "of_child", refuse)
    with pytest.raises(ProcessNotReadableError):
        machine.spawn(
            [sys.executable, "-c", "import time; time.sleep(60)"], env={},
            log_path=tmp_path / "log", marker=Marker("none", "a-00000001"), cwd=tmp_path,
            pass_fds=(),
        )  # fmt: skip
    process: ProcessId = born[0].process
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(born[0].pidfd)
    await asyncio.to_thread(os.waitpid, process.pid, 0)
    assert not is_same(process)
