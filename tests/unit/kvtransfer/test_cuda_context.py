"""The context in which a transport's thread registers a GPU's memory. The driver here is one of our own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvtransfer import cuda_context, nixl_thread
from kvtransfer.types import Region
from runtime.errors import TransferFailed


class Driver:
    """Device d has handle d + 10, its primary context is 1000 + handle. fails: the function that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.current: dict[int, int] = {}
        self.retained: list[int] = []
        self.ready = False

    def cuInit(self, flags: Any) -> int:  # noqa: N802
        self.ready = True
        return 3 if self.fails == "cuInit" else 0

    def cuDeviceGet(self, handle: Any, device: Any) -> int:  # noqa: N802
        assert self.ready
        handle._obj.value = device.value + 10
        return 101 if self.fails == "cuDeviceGet" else 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:  # noqa: N802
        context._obj.value = 1000 + handle.value
        self.retained.append(handle.value)
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.current[threading.get_ident()] = context.value
        return 0


def test_the_primary_context_of_the_device_becomes_the_threads() -> None:
    driver = Driver()
    cuda_context.use(3, lambda name: driver)
    assert driver.current == {threading.get_ident(): 1013}
    assert driver.retained == [13]


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet"])
def test_a_device_that_cannot_be_used_is_a_transfer_that_failed(fails: str) -> None:
    with pytest.raises(TransferFailed, match=fails):
        cuda_context.use(0, lambda name: Driver(fails))


def test_without_a_driver_it_says_so() -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    with pytest.raises(TransferFailed, match="no CUDA driver"):
        cuda_context.use(0, missing)


class Agent:
    """What nixl_thread asks of an agent when it opens: it notes the context its memory is registered in."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.registered: list[tuple[list[tuple[int, int, int, str]], str, int | None]] = []

    def register_memory(self, table: list[tuple[int, int, int, str]], memory: str) -> object:
        self.registered.append((table, memory, self.driver.current.get(threading.get_ident())))
        return object()

    def get_agent_metadata(self) -> bytes:
        return b"metadata"


def opened(monkeypatch: pytest.MonkeyPatch, regions: list[Region]) -> Agent:
    driver = Driver()
    agent = Agent(driver)
    monkeypatch.setattr(nixl_thread, "load", lambda: (None, None))
    monkeypatch.setattr(nixl_thread, "make_agent", lambda *args: agent)
    monkeypatch.setattr(nixl_thread, "Reads", lambda made: None)
    monkeypatch.setattr(cuda_context, "use", lambda device: USE(device, lambda name: driver))
    nixl_thread.Owner("me", 0, lambda results: None).open(regions)
    return agent


USE = cuda_context.use
VRAM = Region(0, "kv", 4096, 64, 8, 0, 1, device=1, memory="VRAM")
HOST = Region(1, "kv@host", 8192, 64, 8, 0, 1)


def test_device_memory_is_registered_as_such_in_its_devices_context(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = opened(monkeypatch, [VRAM, HOST])
    found = {memory: (table, context) for table, memory, context in agent.registered}
    assert found["VRAM"] == ([(4096, 64, 1, "")], 1011)
    assert found["DRAM"][0] == [(8192, 64, 0, "")]


def test_host_memory_asks_for_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(monkeypatch, [HOST]).registered == [([(8192, 64, 0, "")], "DRAM", None)]


def test_one_agent_has_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Region(2, "kv", 16384, 64, 8, 0, 1, device=2, memory="VRAM")
    with pytest.raises(TransferFailed, match="one GPU"):
        opened(monkeypatch, [VRAM, other])
