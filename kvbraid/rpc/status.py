"""A KVBraidError as a gRPC status and back, with google.rpc details.

Every status carries ErrorInfo{reason, domain "kvbraid"}, so that a client can tell its own fault
from a worker's; an overload carries RetryInfo too.
"""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvbraid import errors
from kvbraid.errors import InvalidRequestError, KVBraidError, OverloadedError

DOMAIN = "kvbraid"
DETAILS_KEY = "grpc-status-details-bin"

# gRPC refuses trailers of more than 8 KiB, and with them the status. The message is in them twice:
# with up to 3 characters a byte, and in the details with 4 for 3 bytes.
_MAX_MESSAGE_BYTES = 1600

_BY_REASON: dict[str, type[KVBraidError]] = {
    cls.reason: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, KVBraidError) and "reason" in vars(cls)
}
_BY_CODE: dict[grpc.StatusCode, type[KVBraidError]] = {
    grpc.StatusCode[cls.grpc_code]: cls for cls in _BY_REASON.values()
}


def status_code(error: KVBraidError) -> grpc.StatusCode:
    """The status code of an error's class."""
    return grpc.StatusCode[error.grpc_code]


def status_message(error: KVBraidError) -> str:
    """The text of `error`; the end is left out where it would not fit into a status, as a value
    that came from the client might not."""
    encoded = str(error).encode(errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


def status_details(error: KVBraidError) -> bytes:
    """The serialised google.rpc.Status of `error`, the value of the trailer DETAILS_KEY."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, InvalidRequestError) and error.field:
        info.metadata["field"] = error.field
    number, _ = status_code(error).value
    message = status_message(error)
    status = status_pb2.Status(code=number, message=message, details=[_packed(info)])
    if isinstance(error, OverloadedError):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    serialised: bytes = status.SerializeToString()
    return serialised


def error_from_rpc(failure: grpc.aio.AioRpcError, peer: str) -> KVBraidError:
    """The domain error that a failed call to `peer` stands for; the message names the peer.

    The reason in ErrorInfo decides; without one (a proxy's or the transport's own status) the
    code does, and a code that no class has becomes a plain KVBraidError.
    """
    info, retry = _unpacked(failure)
    cls = _BY_REASON.get(info.reason) if info.domain == DOMAIN else None
    cls = cls or _BY_CODE.get(failure.code(), KVBraidError)
    message = f"{peer}: {failure.details() or failure.code().name}"
    if issubclass(cls, OverloadedError):
        seconds = retry.retry_delay.ToNanoseconds() / 1e9 if retry else 1.0
        return cls(message, retry_after_s=seconds)
    if issubclass(cls, InvalidRequestError):
        return cls(message, field=info.metadata.get("field"))
    return cls(message)


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _unpacked(
    failure: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo | None]:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    has_retry = False
    for detail in _status_of(failure).details:
        detail.Unpack(info)
        has_retry = detail.Unpack(retry) or has_retry
    return info, retry if has_retry else None


def _status_of(failure: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The status in the trailers; an empty one when there is none or a peer wrote nonsense."""
    serialised = dict(failure.trailing_metadata() or ()).get(DETAILS_KEY, b"")
    try:
        return status_pb2.Status.FromString(serialised)
    except (DecodeError, TypeError):
        return status_pb2.Status()
