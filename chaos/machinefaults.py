"""Faults of the machine: its disk, its clock, its CPUs, its limits, its ports."""

import errno
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Literal

from cache.errors import UnderstudyError
from chaos.disk import SkippedError
from chaos.faultmodel import FaultModel, Injury, World
from supervisor.topology.schema import Seconds

__all__ = [
    "BreakFsyncFault",
    "CrashWithDumpFault",
    "FillDiskFault",
    "FreeDiskFault",
    "JumpClockFault",
    "MendFsyncFault",
    "ReadOnlyDiskFault",
    "StarveFault",
    "StrangerFault",
    "StrangerLeavesFault",
]

_DUMP_S: Final = 60.0
_PT_LOAD: Final = 1
_SHARED: Final = re.compile(r"/memfd:understudy-(weights|kv|slots)")
_SPIN: Final = "import os, time; os.nice(0)\nwhile time.monotonic() < float(os.sys.argv[1]): pass"


class FillDiskFault(FaultModel):
    """Nothing more can be written in the state directory (a small file system of its own)."""

    kind: Literal["fill_disk"] = "fill_disk"

    def inject(self, world: World) -> Injury:
        """Write until the file system is full."""
        path = world.system.state_dir / "filler"
        at_ns = time.monotonic_ns()
        with path.open("wb", buffering=0) as stream:
            try:
                while stream.write(bytes(4096)):
                    pass
            except OSError:
                pass  # full: that is what was wanted
        world.on_end(lambda: path.unlink(missing_ok=True))
        return Injury(at_ns, note=f"{path.stat().st_size} bytes")


class FreeDiskFault(FaultModel):
    """The end of `fill_disk`."""

    kind: Literal["free_disk"] = "free_disk"

    def inject(self, world: World) -> Injury:
        """Remove the filler."""
        (world.system.state_dir / "filler").unlink(missing_ok=True)
        return Injury(time.monotonic_ns())


class BreakFsyncFault(FaultModel):
    """From now on fsync fails with EIO, or does not return, in every process of this system."""

    kind: Literal["break_fsync"] = "break_fsync"
    how: Literal["fail", "hang"] = "fail"

    def inject(self, world: World) -> Injury:
        """An order to the hook that every Python child of this system imports first."""
        order = world.fault_dir / ("no-fsync" if self.how == "fail" else "slow-fsync")
        order.touch()
        world.on_end(lambda: order.unlink(missing_ok=True))
        return Injury(time.monotonic_ns(), note=self.how)


class MendFsyncFault(FaultModel):
    """The end of `break_fsync`."""

    kind: Literal["mend_fsync"] = "mend_fsync"

    def inject(self, world: World) -> Injury:
        """Remove the order."""
        for name in ("no-fsync", "slow-fsync"):
            (world.fault_dir / name).unlink(missing_ok=True)
        return Injury(time.monotonic_ns())


class ReadOnlyDiskFault(FaultModel):
    """The file system of the state directory goes read-only while files are open, for good.

    As a real one does that finds an error in itself: it needs `state_disk_kind: ext4`.
    """

    kind: Literal["read_only_disk"] = "read_only_disk"

    def inject(self, world: World) -> Injury:
        """Let ext4 find an error; it was mounted with `errors=remount-ro`."""
        device = os.stat(world.system.state_dir).st_dev  # noqa: PTH116
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        at_ns = time.monotonic_ns()
        (Path("/sys/fs/ext4") / block / "trigger_fs_error").write_text("1")
        try:
            (world.system.state_dir / "probe").touch()
        except OSError as error:
            if error.errno == errno.EROFS:
                return Injury(at_ns, note=block)
        raise UnderstudyError(f"the file system on {block} can still be written")


class StarveFault(FaultModel):
    """Processes that spin, so that everything else waits for a CPU."""

    kind: Literal["starve"] = "starve"
    processes: int = 8
    duration: Seconds = 5.0

    def inject(self, world: World) -> Injury:
        """They end by themselves."""
        at_ns = time.monotonic_ns()
        until_s = str(time.monotonic() + self.duration)
        spinning = [
            subprocess.Popen([sys.executable, "-S", "-E", "-c", _SPIN, until_s])
            for _ in range(self.processes)
        ]

        def end() -> None:
            for process in spinning:
                process.kill()
                process.wait()

        world.on_end(end)
        return Injury(at_ns, note=f"{self.processes} processes for {self.duration:g} s")


class JumpClockFault(FaultModel):
    """The wall clock of every process of this system is off by so much from now on.

    Not the machine's: it would jump for everybody. The hook in the children shifts it.
    """

    kind: Literal["jump_clock"] = "jump_clock"
    hours: float
    """Against the true time; 0 ends it."""

    def inject(self, world: World) -> Injury:
        """At once, in running processes and in those to come."""
        return Injury(world.jump_clock(self.hours * 3600), note=f"to {self.hours:+g} h")


class CrashWithDumpFault(FaultModel):
    """SIGSEGV to a process that may dump its memory, which takes a while.

    Needs a system with `core_dumps`.
    """

    kind: Literal["crash_with_dump"] = "crash_with_dump"
    target: Literal["primary", "standby", "batch"]

    def inject(self, world: World) -> Injury:
        """Says how long the dump took; what it holds of shared memory is a broken promise."""
        target = world.locate(self.target)
        core = Path(f"/proc/{target.pid}/cwd").resolve() / "core"
        if Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core":
            raise SkippedError("core dumps of this machine go elsewhere")
        world.on_end(lambda: core.unlink(missing_ok=True))
        shared = _shared_ranges(target.pid)
        at_ns = time.monotonic_ns()
        world.send(target, signal.SIGSEGV)
        end_s = time.monotonic() + _DUMP_S
        while Path(f"/proc/{target.pid}").exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        took_s = (time.monotonic_ns() - at_ns) / 1e9
        if not core.exists():
            raise UnderstudyError(f"{target.instance} left no {core}")
        held = sum(size for start, size in dumped_ranges(core) if start in shared)
        note = f"{core.stat().st_blocks * 512 >> 20} MiB were dumped in {took_s:.1f} s"
        core.unlink()  # the next fault must not wait for it
        problem = f"{held} bytes of shared memory were dumped" if held else ""
        return Injury(at_ns, (target,), is_deadly=True, note=note, problem=problem)


def _shared_ranges(pid: int) -> set[int]:
    """Where the shared memory of a process begins, mapping by mapping."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.partition("-")[0], 16) for line in lines if _SHARED.search(line)}


def dumped_ranges(core: Path) -> list[tuple[int, int]]:
    """Address and dumped bytes of each area in a core file (ELF, 64 bits, little endian)."""
    with core.open("rb") as file:
        head = file.read(64)
        offset, size, count = (
            *struct.unpack_from("<Q", head, 32),
            *struct.unpack_from("<HH", head, 54),
        )
        file.seek(offset)
        table = file.read(size * count)
    found = []
    for at in range(0, len(table), size):
        kind, _, _, address, _, in_file = struct.unpack_from("<IIQQQQ", table, at)
        if kind == _PT_LOAD:
            found.append((address, in_file))
    return found


class StrangerFault(FaultModel):
    """Another process listens on a port of ours, which must be free by then."""

    kind: Literal["stranger"] = "stranger"
    port: Literal["gateway", "admin"]

    def inject(self, world: World) -> Injury:
        """It accepts nobody; it leaves with `stranger_leaves` or at the end."""
        system = world.system
        number = system.gateway_port if self.port == "gateway" else system.admin_port
        listener = world.strangers.enter_context(socket.socket())
        world.on_end(world.strangers.close)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline = time.monotonic() + 5.0
        while True:
            try:
                listener.bind(("127.0.0.1", number))
                listener.listen()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UnderstudyError(f"port {number} is not free: {error}") from error
                time.sleep(0.02)  # its last holder is being taken down
            else:
                break
        return Injury(time.monotonic_ns(), note=self.port)


class StrangerLeavesFault(FaultModel):
    """The end of `stranger`."""

    kind: Literal["stranger_leaves"] = "stranger_leaves"

    def inject(self, world: World) -> Injury:
        """All of them."""
        world.strangers.close()
        return Injury(time.monotonic_ns())
