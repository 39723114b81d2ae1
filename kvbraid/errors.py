"""Errors that cross a boundary.

KVBraidError
├── InvalidRequestError      the caller's input is wrong               INVALID_ARGUMENT   400
├── NotFoundError            the named model or request does not exist  NOT_FOUND          404
├── OverloadedError          no room now; carries when to come back     RESOURCE_EXHAUSTED 429
├── IncompatibleError        two sides cannot work together             FAILED_PRECONDITION 409
├── LeaseLostError           a lease or incarnation ended; retry        ABORTED            409
├── UnavailableError         a worker is gone, loading or draining      UNAVAILABLE        503
├── DeadlineError            the request's time is up                   DEADLINE_EXCEEDED  504
├── DataLossError            a row was damaged, late or replayed        DATA_LOSS          500
├── RequestCancelledError    the caller went away                       CANCELLED          499
└── StartupError             configuration or checkpoint refused; never crosses the wire
    ├── ConfigError          a setting is unknown, malformed or impossible
    └── CheckpointError      a model folder or file is not what it should be

`kvbraid.rpc.interceptors` maps a class to its status through `grpc_code`; nothing else does.
"""

from __future__ import annotations


class KVBraidError(Exception):
    """Root of every error that KVBraid raises on purpose."""

    grpc_code: str = "INTERNAL"
    http_status: int = 500
    reason: str = "INTERNAL"


class InvalidRequestError(KVBraidError):
    """The caller's input is wrong; the message names the field, its value and what is accepted."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotFoundError(KVBraidError):
    """The named model or request does not exist here."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    reason = "NOT_FOUND"


class OverloadedError(KVBraidError):
    """There is no room now; `retry_after_s` says when to come back."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class IncompatibleError(KVBraidError):
    """Two sides cannot work together: other weights, other KV dtype, other model shape."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 409
    reason = "INCOMPATIBLE"


class LeaseLostError(KVBraidError):
    """A lease ran out or the peer's incarnation changed; a new attempt is safe."""

    grpc_code = "ABORTED"
    http_status = 409
    reason = "LEASE_LOST"


class UnavailableError(KVBraidError):
    """A worker is gone, still loading or draining; another one may serve the request."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "UNAVAILABLE"


class DeadlineError(KVBraidError):
    """The request's deadline passed."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE"


class DataLossError(KVBraidError):
    """A KV row came damaged, late or twice and was refused; the prompt must be computed again."""

    grpc_code = "DATA_LOSS"
    http_status = 500
    reason = "DATA_LOSS"


class RequestCancelledError(KVBraidError):
    """The caller went away."""

    grpc_code = "CANCELLED"
    http_status = 499
    reason = "CANCELLED"


class StartupError(KVBraidError):
    """The process refuses to start."""


class ConfigError(StartupError):
    """A setting is unknown, malformed or cannot work with the others."""


class CheckpointError(StartupError):
    """A model folder or file is not what it should be; the message names the file and tensor."""
