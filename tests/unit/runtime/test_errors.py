from __future__ import annotations

import grpc
import pytest

from protos.v1 import common_pb2
from runtime import errors
from runtime.errors import InvalidRequest, PdserveError


def tree() -> list[type[PdserveError]]:
    """Every class with a reason of its own, wherever it is defined."""
    found, pending = [], [PdserveError]
    while pending:
        cls = pending.pop()
        if "reason" in vars(cls):
            found.append(cls)
        pending.extend(cls.__subclasses__())
    return found


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_every_class_has_a_row_a_reason_of_its_own_and_survives_the_wire(cls: type[PdserveError]) -> None:
    assert [other for other in tree() if other.reason == cls.reason] == [cls]
    error = cls("too many", field="n", limit="4", retry_after_ms=7)
    assert 400 <= error.row.http_status < 600
    again = errors.from_detail(common_pb2.ErrorDetail.FromString(error.detail().SerializeToString()))
    assert type(again) is cls
    assert again.detail() == error.detail()


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_a_reason_of_its_own_keeps_status_and_retryability(cls: type[PdserveError]) -> None:
    error = cls("m", reason="something_special")
    again = errors.from_detail(error.detail(), error.row.grpc_status)
    assert again.reason == "something_special"
    assert again.row.grpc_status is error.row.grpc_status
    assert again.row.retryable == error.row.retryable


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_an_error_inside_a_message_keeps_its_class_whatever_its_reason_is(cls: type[PdserveError]) -> None:
    """Refusals and failed legs come without a gRPC status; what becomes of the request depends on the class."""
    error = cls("m", reason="something_special", field="n")
    again = errors.from_detail(common_pb2.ErrorDetail.FromString(error.detail().SerializeToString()))
    assert type(again) is cls
    assert again.reason == "something_special"


def test_a_class_without_a_reason_of_its_own_is_never_what_a_peer_meant() -> None:
    class Inner(errors.KvLost):
        pass

    assert Inner("m").reason == "kv_lost"
    assert type(errors.from_detail(Inner("m").detail())) is errors.KvLost


def test_every_table_row_belongs_to_the_tree() -> None:
    assert set(errors.TABLE) <= set(tree())


@pytest.mark.parametrize("status", list(grpc.StatusCode), ids=lambda status: status.name)
def test_every_foreign_status_becomes_an_error_of_ours(status: grpc.StatusCode) -> None:
    error = errors.from_status(status)
    assert error.message
    if status in {row.grpc_status for row in errors.TABLE.values()}:
        assert error.row.grpc_status is status


def test_an_empty_detail_is_an_internal_error() -> None:
    assert errors.from_detail(common_pb2.ErrorDetail()).reason == "internal"


@pytest.mark.parametrize(
    ("message", "field", "limit", "line"),
    [
        ("too late", "", "", "too late"),
        ("cannot listen", "http_listen", "", "http_listen: cannot listen"),
        ("max_batch: more than 0", "max_batch", "more than 0", "max_batch: more than 0"),
        ("the role is unknown", "role", "prefill, decode", "role: the role is unknown (limit: prefill, decode)"),
    ],
)
def test_a_person_is_told_the_field_and_the_limit_once(message: str, field: str, limit: str, line: str) -> None:
    assert InvalidRequest(message, field=field, limit=limit).line == line
