"""NIXL as it is installed: the only file that imports it.

- With Debian's ibverbs providers installed, UCX's EFA module crashes the exiting process: it is left out.
- The progress thread polls without a pause unless its delay is set, which the Python API does not offer.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from typing import Any

from kvtransfer.mapping import U64
from runtime.errors import TransferFailed


def load() -> tuple[Any, Any]:
    """(API module, bindings module) of whichever NIXL build is installed. Raises TransferFailed when none is."""
    os.environ.setdefault("UCX_MODULES", "^efa")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # its default is stdout, which may be somebody's output
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._api"), importlib.import_module(f"{name}._bindings")
        except ImportError:
            continue
    raise TransferFailed("NIXL is not installed: install the `worker` extra, or choose another transport")


@lru_cache(maxsize=1)
def failures() -> tuple[type[Exception], ...]:
    """What a call into NIXL may raise that is not our bug: its own classes, which have no base in common, and
    RuntimeError, which any other C++ exception becomes. Nothing where NIXL is not installed."""
    try:
        _, bindings = load()
    except TransferFailed:
        return ()
    own = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError)


class Reads:
    """An agent's reads, by the bindings themselves: NIXL's Python wrapper around them costs a short read several
    percent. A handle is a number here: whoever has it releases it once, after its end, and never uses it again.
    """

    def __init__(self, agent: Any) -> None:
        _, bindings = load()
        self._agent = agent.agent
        self._table = bindings.nixlXferDList
        self._kinds = dict(agent.nixl_mems)
        self._operation = agent.nixl_ops["READ"]
        self._done, self._progress = bindings.NIXL_SUCCESS, bindings.NIXL_IN_PROG

    def prepare(self, peer: str, local: U64, local_memory: str, remote: U64, remote_memory: str) -> int:
        """The handle of a read of `remote` into `local`: tables [n, 3] of address, length, device."""
        to = self._table(self._kinds[local_memory], local)
        source = self._table(self._kinds[remote_memory], remote)
        return int(self._agent.createXferReq(self._operation, to, source, peer, b"", []))

    def post(self, handle: int) -> str:
        """Start it: "DONE" (over shared memory it is over already), "PROC" or "ERR"."""
        return self._named(self._agent.postXferReq(handle, b""))

    def state(self, handle: int) -> str:
        return self._named(self._agent.getXferStatus(handle))

    def counted(self, handle: int) -> Any:
        """What NIXL counted: totalBytes, descCount, xferDuration (microseconds)."""
        return self._agent.getXferTelemetry(handle)

    def release(self, handle: int) -> None:
        self._agent.releaseXferReq(handle)

    def _named(self, status: Any) -> str:
        if status == self._done:
            return "DONE"
        return "PROC" if status == self._progress else "ERR"


def make_agent(api: Any, bindings: Any, name: str, progress_us: int) -> Any:
    """A UCX agent whose progress thread sleeps `progress_us` between rounds (0 = polls without a pause)."""
    original: Any = bindings.nixlAgentConfig

    class Config(original):  # type: ignore[misc]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, progress_us if key == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config
    try:
        return api.nixl_agent(
            name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"], capture_telemetry=True)
        )
    finally:
        bindings.nixlAgentConfig = original
