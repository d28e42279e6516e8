"""The network between simulated workers: NICs shared by neighbours, their bandwidth shared by what flows."""

from __future__ import annotations

from collections.abc import Callable

from bench.sim.agenda import Agenda
from bench.sim.profile import Transfer


class Flow:
    """One hand-off on its way. `left` bytes at time `since`, moving at `rate`."""

    __slots__ = ("done", "left", "nics", "rate", "since", "version")

    def __init__(self, nics: tuple[int, int], size: float, done: Callable[[], None]) -> None:
        self.nics = nics
        self.left = size
        self.rate = 0.0
        self.since = 0.0
        self.version = 0
        self.done = done


class Fabric:
    """Each flow gets the smaller of its fair shares at the two NICs it passes."""

    def __init__(self, agenda: Agenda, terms: Transfer) -> None:
        self._agenda = agenda
        self._terms = terms
        self._flows: dict[int, set[Flow]] = {}

    def nic(self, worker: int) -> int:
        return worker // self._terms.shared_nic_workers

    def share(self, source: int, target: int) -> float:
        """Bytes per second one more flow would get now."""
        crowd = max(len(self._flows.get(self.nic(w), ())) for w in (source, target))
        return self._terms.bandwidth_Bps / (crowd + 1)

    def active(self) -> int:
        return len({flow for flows in self._flows.values() for flow in flows})

    def send(self, source: int, target: int, size: float, done: Callable[[], None]) -> None:
        """Call done() when `size` bytes have arrived."""
        flow = Flow((self.nic(source), self.nic(target)), size, done)
        self._agenda.at(self._agenda.now + self._terms.setup_s, self._begin, flow)

    def _begin(self, flow: Flow) -> None:
        flow.since = self._agenda.now
        for nic in flow.nics:
            self._flows.setdefault(nic, set()).add(flow)
        self._share_again(flow.nics)

    def _end(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        for nic in set(flow.nics):
            self._flows[nic].discard(flow)
        self._share_again(flow.nics)
        flow.done()

    def _share_again(self, nics: tuple[int, int]) -> None:
        now = self._agenda.now
        for flow in {flow for nic in nics for flow in self._flows[nic]}:
            crowd = max(len(self._flows[nic]) for nic in flow.nics)
            rate = self._terms.bandwidth_Bps / crowd
            if rate == flow.rate:
                continue
            flow.left -= flow.rate * (now - flow.since)
            flow.since, flow.rate = now, rate
            flow.version += 1
            self._agenda.at(now + max(flow.left, 0.0) / rate, self._end, flow, flow.version)
