"""Health of a process, composed of named checks.

live: the process itself works (its loops turn); no look at what it depends on, or an outage would restart everybody.
ready: live, not draining, and every check says yes; only then is it given work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.errors import NotFound
from runtime.rpc_errors import ServicerContext

Check = Callable[[], bool]

_WATCH_S = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """`failing` names what says no; safe to show."""

    ok: bool
    failing: tuple[str, ...]


class Health:
    """checks: what must hold to be ready. live_checks: what must hold to be alive at all. A check is quick, does no
    I/O and does not raise. `draining` is set by the owner and takes readiness away, not liveness."""

    def __init__(self, checks: Mapping[str, Check], live_checks: Mapping[str, Check] | None = None) -> None:
        self._ready = dict(checks)
        self._live = dict(live_checks or {})
        self.draining = False

    def live(self) -> Report:
        return _report(_failing(self._live))

    def ready(self) -> Report:
        failing = _failing(self._live) + _failing(self._ready)
        return _report([*failing, "draining"] if self.draining else failing)


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """grpc.health.v1 over a Health. The names "" and those given answer for readiness, "live" for liveness."""

    def __init__(self, health: Health, services: Iterable[str] = ()) -> None:
        self._health = health
        self._names = frozenset(["", *services])

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound("unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and again whenever it changes (seen within 0.2 s). An unknown service is no error here."""
        last: int | None = None
        while True:
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_S)

    def _status(self, service: str) -> int:
        status = health_pb2.HealthCheckResponse
        if service == "live":
            report = self._health.live()
        elif service in self._names:
            report = self._health.ready()
        else:
            return int(status.SERVICE_UNKNOWN)
        return int(status.SERVING if report.ok else status.NOT_SERVING)


def _failing(checks: Mapping[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if not check()]


def _report(failing: list[str]) -> Report:
    return Report(not failing, tuple(failing))
