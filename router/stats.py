"""What the router counts and logs: one outcome and one ledger per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from router.request import Outcome
from runtime.errors import Cancelled, PdserveError
from runtime.metrics import Metrics

STAGES = ("render_s", "queue_s", "route_s", "prefill_s", "handoff_wait_s", "transfer_s", "decode_s", "checksum_s")


class Record:
    """The one outcome of a call: failed() for an error that was sent inside a stream, else the exception that leaves
    the block, else completed."""

    def __init__(self, tenant: str, request_id: str) -> None:
        self.tenant = tenant
        self.request_id = request_id
        self.label = ""
        self.outcomes: Sequence[Outcome] = ()
        self.error: PdserveError | None = None

    def completed(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes

    def failed(self, error: PdserveError) -> None:
        self.error = error


class Counted:
    """The block of one call. A class, since contextlib's generators cost a microsecond more."""

    __slots__ = ("_record", "_stats")

    def __init__(self, stats: Stats, record: Record) -> None:
        self._stats = stats
        self._record = record

    def __enter__(self) -> Record:
        self._stats.began()
        return self._record

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._stats.left(self._record, error)


class Stats:
    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        # Bound once: looking the configuration up again for every request costs more than writing the line.
        self._log = structlog.get_logger("pdserve.router.dispatch").bind()
        self._requests = metrics.counter("pdserve_requests", "Calls by their one terminal event", ["outcome", "reason"])
        self._completed_requests = self._requests.labels("completed", "")
        self._errors = metrics.counter("pdserve_error_answers", "Error answers by reason", ["reason"])
        self._running = 0
        metrics.gauge("pdserve_requests_inflight", "Calls being answered").set_function(lambda: self._running)
        self._ttft = metrics.histogram("pdserve_ttft_seconds", "Arrival to first token")
        self._itl = metrics.histogram("pdserve_itl_seconds", "Mean time between tokens of a request")
        stage = self._stage = metrics.histogram(
            "pdserve_stage_seconds", "Seconds of each stage of a request", ["stage"]
        )
        self._stages = [(name, stage.labels(name.removesuffix("_s"))) for name in STAGES]
        prompt = metrics.counter("pdserve_prompt_tokens", "Prompt tokens of completed requests", ["source"])
        self._cached, self._computed = prompt.labels("cached"), prompt.labels("computed")
        self._completion = metrics.counter("pdserve_completion_tokens", "Tokens of completed answers")
        self._moved = metrics.counter("pdserve_transfer_bytes", "Bytes moved between workers")
        self._clients = metrics.counter("pdserve_router_client_events", "Slow or vanished clients", ["event"])

    def refused(self, error: PdserveError) -> None:
        """An error answer over HTTP or gRPC, whether the call was dispatched or not."""
        self._errors.labels(_bounded(error.reason)).inc()

    def slow_client(self) -> None:
        self._clients.labels("slow").inc()

    def request(self, tenant: str, request_id: str) -> Counted:
        """One call, from its first byte: exactly one outcome is counted on leaving the block, whichever way."""
        return Counted(self, Record(tenant, request_id))

    def began(self) -> None:
        self._running += 1

    def left(self, record: Record, error: BaseException | None) -> None:
        """A call is over; `error` came out of it."""
        self._running -= 1
        if error is None:
            if record.error is not None:
                self._ended(record, record.error)
            else:
                self._completed_requests.inc()
                self._completed(record)
        elif isinstance(error, PdserveError):
            self._ended(record, error)
        elif isinstance(error, ConnectionError):
            self._ended(record, record.error or Cancelled("the client went away"))
        elif isinstance(error, Exception):
            self._ended(record, PdserveError("internal error"))
        else:  # cancelled, or its generator closed: the client went away
            self._ended(record, Cancelled("the client went away"))

    def _ended(self, record: Record, error: PdserveError) -> None:
        outcome = _outcome(error)
        self._requests.labels(outcome, _bounded(error.reason)).inc()
        self._log.info(
            "request",
            outcome=outcome,
            reason=error.reason,
            field=error.field,
            request_id=record.request_id,
            tenant=record.tenant,
            label=record.label,
        )

    def _completed(self, record: Record) -> None:
        for outcome in record.outcomes:
            ledger = outcome.ledger
            values: dict[str, Any] = ledger.values()
            self._ttft.observe(max(0.0, ledger.first_token_s))
            if outcome.completion_tokens > 1:
                self._itl.observe(max(0.0, (ledger.total_s - ledger.first_token_s) / (outcome.completion_tokens - 1)))
            self._stage.observe_all([(stage, max(0.0, values[name])) for name, stage in self._stages])
            for counter, count in (
                (self._cached, outcome.cached_tokens),
                (self._computed, outcome.prompt_tokens - outcome.cached_tokens),
                (self._completion, outcome.completion_tokens),
                (self._moved, values["transfer_bytes"]),
            ):
                if count:
                    counter.inc(count)
            self._log.info(
                "request",
                outcome="completed",
                request_id=outcome.request_id,
                tenant=record.tenant,
                label=record.label,
                prompt_tokens=outcome.prompt_tokens,
                completion_tokens=outcome.completion_tokens,
                cached_tokens=outcome.cached_tokens,
                ledger={name: given for name, given in values.items() if given},
            )


def _outcome(error: PdserveError) -> str:
    """The terminal event's name: rejected, cancelled, deadline or failed."""
    status = error.row.http_status
    if isinstance(error, Cancelled):
        return "cancelled"
    if status == 504:
        return "deadline"
    return "rejected" if status < 500 or error.reason in _REJECTIONS else "failed"


_REJECTIONS = frozenset(
    {
        "no_prefill_worker",
        "no_decode_worker",
        "no_compatible_decode_worker",
        "queue_full",
        "queue_timeout",
        "overloaded",
        "draining",
    }
)


def _bounded(reason: str) -> str:
    """A reason comes from a worker sometimes: keep the label's cardinality in hand."""
    return reason if len(reason) <= 64 and reason.replace("_", "").isalnum() else "other"
