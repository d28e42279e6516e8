"""NIXL as it is installed: the only file that imports it.

- With Debian's ibverbs providers installed, UCX's EFA module crashes the exiting process: it is left out.
- The progress thread polls without a pause unless its delay is set, which the Python API does not offer.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from typing import Any

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
