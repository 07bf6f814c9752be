"""Where things lie below a state directory. One place, so that two parts never disagree."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from supervisor.observe.files import ensure_private_dir

__all__ = ["StatePaths"]


@dataclass(frozen=True, slots=True)
class StatePaths:
    """Paths below one state directory (absolute)."""

    root: Path

    @property
    def run(self) -> Path:
        """Sockets of living processes, mode 0700."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """One log file per process name, mode 0700."""
        return self.root / "logs"

    def control(self, instance: str) -> Path:
        """Control socket of a child."""
        return self.run / f"{instance}.sock"

    def generate(self, instance: str) -> Path:
        """Generation socket of an engine."""
        return self.run / f"{instance}.gen"

    def http(self, instance: str) -> Path:
        """HTTP socket of an engine."""
        return self.run / f"{instance}.http"

    def server(self, instance: str) -> Path:
        """Socket of a command engine's server, where it takes one."""
        return self.run / f"{instance}.srv"

    def cache(self, group: str) -> Path:
        """Socket of the group's cache daemon: the same for every instance of it."""
        return self.run / f"cache-{group}.sock"

    def log(self, name: str) -> Path:
        """Log file of a process; successive instances append to it."""
        return self.logs / f"{name}.log"

    def make(self) -> None:
        """Create the folders, each 0700.

        Raises:
            ConfigurationError: the state directory cannot be used.
        """
        for folder in (self.root, self.run, self.logs):
            ensure_private_dir(folder)

    def forget(self, instance: str) -> None:
        """Remove what a dead instance left in `run`."""
        for path in (
            self.control(instance),
            self.generate(instance),
            self.http(instance),
            self.server(instance),
        ):
            with contextlib.suppress(OSError):  # a disk that takes nothing; the names are unique
                path.unlink(missing_ok=True)
