"""Prometheus metrics of one process, in a registry of our own: nothing global, so tests and embedded parts do not mix.

Every name begins with `pdserve_`. Asking for a metric again gives the same one, so parts need not share objects.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from runtime.errors import InvalidRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Histogram bounds for durations, from one decode step to a long prompt."""

_PREFIX = "pdserve_"


class _Buckets:
    """The observations under one set of label values."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float], lock: threading.Lock) -> None:
        """lock: its histogram's."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = lock

    def observe(self, amount: float) -> None:
        with self._lock:
            self.add(amount)

    def add(self, amount: float) -> None:
        """With the lock held."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def read(self) -> tuple[list[int], float]:
        """(observations up to each bound, the last without one; their sum)."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


class Histogram(Collector):
    """An observation takes 0.2 us, and prometheus_client's own 0.56: a request has ten. observe() is for a histogram
    without labels."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry, bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._help = help_text
        self._label_names = tuple(labels)
        self._bounds = tuple(bounds)
        self._children: dict[tuple[str, ...], _Buckets] = {}
        self._lock = threading.Lock()
        self._only = None if labels else self.labels()
        registry.register(self)

    def labels(self, *values: str) -> _Buckets:
        assert len(values) == len(self._label_names), f"{self._name} has the labels {self._label_names}"
        child = self._children.get(values)
        return child if child is not None else self._children.setdefault(values, _Buckets(self._bounds, self._lock))

    def observe_all(self, amounts: Iterable[tuple[_Buckets, float]]) -> None:
        """One observation under each of these labels, at the price of one."""
        with self._lock:
            for child, amount in amounts:
                child.add(amount)

    def observe(self, amount: float) -> None:
        assert self._only is not None, f"{self._name} has labels"
        self._only.observe(amount)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._label_names)
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        for values, child in list(self._children.items()):
            counts, total = child.read()
            family.add_metric(values, list(zip(names, counts, strict=True)), total)
        yield family


M = TypeVar("M", Counter, Gauge, Histogram)


class Metrics:
    """Makes and holds metrics; render() is what /metrics answers. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._lock = threading.Lock()
        self._made: dict[str, tuple[tuple[str, ...], Counter | Gauge | Histogram]] = {}

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """`name` without the `_total` that the exposition adds."""
        return self._get(name, labels, Counter, lambda: Counter(name, help_text, labels, registry=self.registry))

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        return self._get(name, labels, Gauge, lambda: Gauge(name, help_text, labels, registry=self.registry))

    def histogram(
        self, name: str, help_text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        return self._get(
            name,
            labels,
            Histogram,
            lambda: Histogram(name, help_text, labels, self.registry, buckets),
        )

    def render(self) -> bytes:
        """The text exposition, content type CONTENT_TYPE."""
        return generate_latest(self.registry)

    def serve(self, listen: str) -> str:
        """Answer scrapes at `listen` ("host:port", 0 = any) from a thread of its own until the process ends, so that
        a busy process is seen too. Returns "host:port" really bound. Raises InvalidRequest."""
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequest("an address is host:port", field="metrics_listen", limit="host:port")
        try:
            server, _ = start_http_server(int(port), host.strip("[]"), registry=self.registry)
        except (OSError, OverflowError) as exc:
            raise InvalidRequest(f"cannot listen on {listen}", field="metrics_listen") from exc
        return f"{host}:{server.server_port}"

    def value(self, name: str, labels: dict[str, str] | None = None) -> float:
        """The current value of a sample (a counter's with `_total`), 0.0 when nothing was counted yet."""
        found = self.registry.get_sample_value(name, labels or {})
        return 0.0 if found is None else found

    def _get(self, name: str, labels: Sequence[str], kind: type[M], make: Callable[[], M]) -> M:
        assert name.startswith(_PREFIX), name
        with self._lock:
            if name in self._made:
                known_labels, known = self._made[name]
                assert isinstance(known, kind), f"{name} is another kind of metric"
                assert known_labels == tuple(labels), f"{name} has other labels"
                return known
            metric = make()
            self._made[name] = (tuple(labels), metric)
            return metric
