"""One exception tree and one table: class -> gRPC status -> HTTP status -> retryable -> counts against the breaker.

Raise these for whatever a user or a peer can cause; `assert` is for bugs. A client sees `reason` and `message` and
never the text of another exception, so neither may hold paths, addresses, prompts or keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from protos.v1 import common_pb2


class PdserveError(Exception):
    """Base of every error this system raises on purpose.

    reason: stable snake_case code; message: one sentence for the caller; field and limit: what was wrong with the
    input, where that is the cause; retry_after_ms: when trying again makes sense.
    """

    reason = "internal"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str = "",
        limit: str = "",
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.field = field
        self.limit = limit
        self.retry_after_ms = retry_after_ms

    @property
    def row(self) -> Row:
        """This error's line of TABLE (of its nearest listed class)."""
        for cls in type(self).__mro__:
            if cls in TABLE:
                return TABLE[cls]
        raise AssertionError("PdserveError itself is listed")

    def detail(self) -> common_pb2.ErrorDetail:
        """The wire form."""
        return common_pb2.ErrorDetail(
            reason=self.reason,
            message=self.message,
            retryable=self.row.retryable,
            retry_after_ms=self.retry_after_ms,
            field=self.field,
            limit=self.limit,
            kind=self.kind,
        )

    @property
    def line(self) -> str:
        """For a person: the message with its field and its limit, where it does not say them itself."""
        field = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        limit = f" (limit: {self.limit})" if self.limit and self.limit not in self.message else ""
        return f"{field}{self.message}{limit}"

    @property
    def kind(self) -> str:
        """The reason of the nearest class that has one of its own."""
        mro = type(self).__mro__
        return next(cls.reason for cls in mro if issubclass(cls, PdserveError) and "reason" in vars(cls))


class InvalidRequest(PdserveError):
    """The request can never succeed as it is."""

    reason = "invalid_request"


class PayloadTooLarge(InvalidRequest):
    reason = "payload_too_large"


class Unauthenticated(PdserveError):
    reason = "unauthenticated"


class PermissionDenied(PdserveError):
    reason = "permission_denied"


class NotFound(PdserveError):
    reason = "not_found"


class QuotaExceeded(PdserveError):
    """The caller's own limit: 429."""

    reason = "quota_exceeded"


class Saturated(PdserveError):
    """The fleet's limit, or no usable pair: 503."""

    reason = "saturated"


class Draining(Saturated):
    reason = "draining"


class RegistryUnavailable(Saturated):
    """The store of worker records does not answer; the last view stays in use."""

    reason = "registry_unavailable"


class WorkerLost(PdserveError):
    """A worker died, froze or lost the request's stream."""

    reason = "worker_lost"


class KvLost(PdserveError):
    """The pages of a hand-off are not to be had any more; prefill again."""

    reason = "kv_lost"


class TicketInvalid(KvLost):
    """Unknown, expired, released, forged, or of another epoch or layout. No byte has moved."""

    reason = "ticket_invalid"


class LayoutMismatch(PdserveError):
    """Two workers that must not be paired; the message names both values."""

    reason = "layout_mismatch"


class EpochMismatch(PdserveError):
    """The caller speaks to an incarnation of this worker that is gone; look it up again."""

    reason = "epoch_mismatch"


class ChecksumMismatch(KvLost):
    reason = "checksum_mismatch"


class TransferFailed(KvLost):
    reason = "transfer_failed"


class DeadlineExceeded(PdserveError):
    reason = "deadline_exceeded"


class Cancelled(PdserveError):
    reason = "cancelled"


class Unsupported(InvalidRequest):
    """A field or feature that exists elsewhere and is not honoured here."""

    reason = "unsupported"


@dataclass(frozen=True, slots=True)
class Row:
    grpc_status: grpc.StatusCode
    http_status: int
    retryable: bool
    breaker: bool


_G = grpc.StatusCode
TABLE: dict[type[PdserveError], Row] = {
    PdserveError: Row(_G.INTERNAL, 500, False, True),
    InvalidRequest: Row(_G.INVALID_ARGUMENT, 400, False, False),
    PayloadTooLarge: Row(_G.INVALID_ARGUMENT, 413, False, False),
    Unauthenticated: Row(_G.UNAUTHENTICATED, 401, False, False),
    PermissionDenied: Row(_G.PERMISSION_DENIED, 403, False, False),
    NotFound: Row(_G.NOT_FOUND, 404, False, False),
    QuotaExceeded: Row(_G.RESOURCE_EXHAUSTED, 429, True, False),
    Saturated: Row(_G.UNAVAILABLE, 503, True, False),
    WorkerLost: Row(_G.UNAVAILABLE, 503, True, True),
    KvLost: Row(_G.FAILED_PRECONDITION, 503, True, False),
    LayoutMismatch: Row(_G.FAILED_PRECONDITION, 503, False, False),
    EpochMismatch: Row(_G.FAILED_PRECONDITION, 503, True, False),
    ChecksumMismatch: Row(_G.DATA_LOSS, 503, True, True),
    TransferFailed: Row(_G.UNAVAILABLE, 503, True, True),
    DeadlineExceeded: Row(_G.DEADLINE_EXCEEDED, 504, False, False),
    Cancelled: Row(_G.CANCELLED, 499, False, False),
}


def classes() -> dict[str, type[PdserveError]]:
    """reason -> class, over the whole tree. A class without a reason of its own is its parent's business (a step
    inside one module) and never what a peer meant."""
    found: dict[str, type[PdserveError]] = {}
    pending: list[type[PdserveError]] = [PdserveError]
    while pending:
        cls = pending.pop()
        if "reason" in vars(cls):
            found[cls.reason] = cls
        pending.extend(cls.__subclasses__())
    return found


def let_go(error: BaseException) -> None:
    """It has been answered, and nobody asks where it came from. An error knows the frames it has passed, they know the
    request and its tasks, and these know their error: a hundred objects that only the collector would free, and after
    five hundred refusals it stopped everybody else for 40 ms."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def from_detail(detail: common_pb2.ErrorDetail, status: grpc.StatusCode | None = None) -> PdserveError:
    """The error a peer described. An unlisted reason is kept and takes its class from its kind, else from the gRPC
    status, if given."""
    known = classes()
    cls = known.get(detail.reason) or known.get(detail.kind) or _class_of(status, detail.retryable)
    return cls(
        detail.message,
        reason=detail.reason or None,
        field=detail.field,
        limit=detail.limit,
        retry_after_ms=detail.retry_after_ms,
    )


def from_status(status: grpc.StatusCode) -> PdserveError:
    """The error for a gRPC status that came without our detail: made by the transport or by a foreign server.

    The text is ours, since a transport's own text holds addresses.
    """
    text = _TRANSPORT_TEXT.get(status, "the peer failed")
    return _TRANSPORT.get(status, PdserveError)(text)


_TRANSPORT: dict[grpc.StatusCode, type[PdserveError]] = {
    _G.INVALID_ARGUMENT: InvalidRequest,
    _G.OUT_OF_RANGE: InvalidRequest,
    _G.UNAUTHENTICATED: Unauthenticated,
    _G.PERMISSION_DENIED: PermissionDenied,
    _G.NOT_FOUND: NotFound,
    _G.RESOURCE_EXHAUSTED: QuotaExceeded,
    _G.UNAVAILABLE: WorkerLost,
    _G.FAILED_PRECONDITION: KvLost,
    _G.DATA_LOSS: ChecksumMismatch,
    _G.DEADLINE_EXCEEDED: DeadlineExceeded,
    _G.CANCELLED: Cancelled,
    _G.UNIMPLEMENTED: Unsupported,
}
_TRANSPORT_TEXT: dict[grpc.StatusCode, str] = {
    _G.UNAVAILABLE: "the peer is not reachable",
    _G.DEADLINE_EXCEEDED: "the deadline passed",
    _G.CANCELLED: "the call was cancelled",
    _G.UNIMPLEMENTED: "the peer does not offer this call",
    _G.RESOURCE_EXHAUSTED: "the peer takes no more work from this caller",
    _G.INVALID_ARGUMENT: "the peer refused the request",
}


def _class_of(status: grpc.StatusCode | None, retryable: bool) -> type[PdserveError]:
    """The class of TABLE with this status, the one that agrees about retrying first."""
    same = [cls for cls, row in TABLE.items() if row.grpc_status is status]
    agreeing = [cls for cls in same if TABLE[cls].retryable == retryable]
    return (agreeing or same or [PdserveError])[0]
