"""The state folder: a lock and one small JSON record of the cluster that runs here, readable by its owner only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.processes import alive
from runtime.errors import InvalidRequest

RECORD = "cluster.json"
LOGS = "logs"


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What `status`, `chat` and `down` need to find a cluster. Addresses are host:port."""

    launcher_pid: int
    launcher_start: int  # with the pid: which process, even after the pid was used again
    http: str
    grpc: str
    ray_address: str  # "" while ours starts, and of simulated workers
    ray_folder: str  # of a Ray started here; "" when an existing one was joined
    namespace: str
    workers: tuple[str, ...]
    model: str
    detached: bool
    registry_token: str = ""
    metrics: str = ""  # of the routers, with commas between them
    sim: str = ""  # the profile of simulated workers
    routers: tuple[int, ...] = ()  # their processes
    renewals: int = 0  # how often the routers have been restarted, and how the last time ended
    renewal_error: str = ""

    @property
    def running(self) -> bool:
        return alive(self.launcher_pid, self.launcher_start)

    @property
    def joined(self) -> bool:
        """Whether its workers live in a Ray of somebody else, and so outlive its launcher."""
        return bool(self.ray_address) and not self.ray_folder


def default_folder() -> Path:
    """Under the user's runtime directory, else the temporary one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "pdserve"
    return Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"


class StateDir:
    """The folder of one cluster. Created 0700; one that others can write to is refused."""

    def __init__(self, folder: str | Path = "") -> None:
        self.given = bool(folder)
        self.folder = Path(folder) if folder else default_folder()

    @property
    def logs(self) -> Path:
        return self.folder / LOGS

    def create(self) -> None:
        """Raises InvalidRequest, as everything here does for a folder that cannot be used."""
        with self._usable():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = self.folder.lstat()
            safe = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
            if not safe:
                raise InvalidRequest("the state folder belongs to somebody else", field="state_dir")
            self.folder.chmod(0o700)
            self.logs.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second `up`. Raises InvalidRequest when another one has it."""
        self.create()
        with self._usable():
            file = (self.folder / "lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidRequest(
                    "another `pdserve up` is starting or running in this state folder", field="state_dir"
                ) from None
            yield

    def read(self) -> ClusterRecord | None:
        """The record, or None when no cluster was started here. Raises InvalidRequest on a damaged one."""
        try:
            raw = json.loads((self.folder / RECORD).read_text())
            return ClusterRecord(**{**raw, "workers": tuple(raw["workers"]), "routers": tuple(raw.get("routers", ()))})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unusable(error) from error
        except (ValueError, TypeError, KeyError):
            raise InvalidRequest("the cluster record cannot be read; remove the folder", field="state_dir") from None

    def write(self, record: ClusterRecord) -> None:
        """Atomically, so that a reader never sees half of it."""
        temporary = self.folder / f".{RECORD}.{os.getpid()}"
        with self._usable():
            try:
                temporary.write_text(json.dumps(asdict(record), indent=1))
                temporary.chmod(0o600)
                temporary.replace(self.folder / RECORD)
            finally:
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"the folder {self.folder} cannot be used: {error.strerror}", field="state_dir")

    def clear(self) -> None:
        """Forget the cluster. A folder made by default goes altogether; one the user named keeps its logs."""
        if not self.given:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        (self.folder / RECORD).unlink(missing_ok=True)

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a process's log."""
        try:
            text = (self.logs / f"{name}.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
