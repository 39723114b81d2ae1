"""The server's one interceptor: admission, request id, metrics, and errors to statuses.

Our own errors become the status of their class with details. asyncio.CancelledError passes
through, so a cancelled call unwinds its handler. Anything else is a bug: logged with its
traceback, INTERNAL to the client.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError

from kvbraid.errors import InvalidRequestError, KVBraidError
from kvbraid.rpc.admission import Admission
from kvbraid.rpc.status import DETAILS_KEY, status_code, status_details, status_message
from kvbraid.telemetry.context import bind_request_id
from kvbraid.telemetry.metrics import RpcMetrics

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    Behaviour = Callable[[Any, Context], Any]

REQUEST_ID_KEY = "x-request-id"


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of our own services, of all four kinds of call."""

    def __init__(self, *, admission: Admission, metrics: RpcMetrics) -> None:
        self._admission = admission
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler, wrapped; None when nobody serves it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        # Health and reflection answer without us: a probe must not fail for our reasons.
        if handler is None or method.startswith("/grpc."):
            return handler
        return self._wrapped(handler, method)

    def _wrapped(self, handler: Handler, method: str) -> Handler:
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(k for k in kinds if getattr(handler, k) is not None)
        behaviour = cast("Behaviour", getattr(handler, kind))
        run = _answer_many if kind.endswith("stream") else _answer_one

        # A single request is parsed in here: grpc answers UNKNOWN for bytes that are no message,
        # but they are the client's fault.
        parse = handler.request_deserializer if kind.startswith("unary") else None
        deserializer = None if parse is not None else handler.request_deserializer

        async def serve(request: Any, context: Context) -> Any:
            return await self._serve(run, behaviour, method, parse, request, context)

        factory = getattr(grpc, f"{kind}_rpc_method_handler")
        return cast("Handler", factory(serve, deserializer, handler.response_serializer))

    async def _serve(
        self,
        run: Callable[[Behaviour, Any, Context], Awaitable[Any]],
        behaviour: Behaviour,
        method: str,
        parse: Callable[[bytes], Any] | None,
        request: Any,
        context: Context,
    ) -> Any:
        started = time.monotonic()
        code = grpc.StatusCode.OK
        try:
            with (
                self._admission.admitted(method),
                self._metrics.in_flight_requests.track_inprogress(),
            ):
                request = _parsed(parse, request, method) if parse is not None else request
                bind_request_id(_request_id(request, context))
                return await run(behaviour, request, context)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            code = context.code()
            raise
        except grpc.aio.InternalError as failure:
            # The call has ended under an answer that waited to be sent: the caller is gone.
            code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError from failure
        except KVBraidError as error:
            code = status_code(error)
            await self._fail(context, error)
        except Exception as error:
            code = grpc.StatusCode.INTERNAL
            logger.exception("unexpected error in %s", method)
            await self._fail(context, KVBraidError(f"internal error: {type(error).__name__}"))
        finally:
            self._metrics.requests_total.labels(method=method, code=code.name).inc()
            self._metrics.duration_seconds.labels(method=method).observe(time.monotonic() - started)

    async def _fail(self, context: Context, error: KVBraidError) -> None:
        code = status_code(error)
        self._metrics.errors_total.labels(code=code.name, reason=error.reason).inc()
        trailers = ((DETAILS_KEY, status_details(error)),)
        try:
            await context.abort(code, status_message(error), trailing_metadata=trailers)
        except grpc.aio.InternalError as failure:
            # Its status waits behind answers that the client does not read, and now it has gone.
            raise asyncio.CancelledError from failure


def _parsed(parse: Callable[[bytes], Any], data: bytes, method: str) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequestError(f"the bytes are no request of {method}: {error}") from error


async def _answer_one(behaviour: Behaviour, request: Any, context: Context) -> Any:
    return await behaviour(request, context)


async def _answer_many(behaviour: Behaviour, request: Any, context: Context) -> None:
    """Write what the handler yields; a handler that writes to the context itself is awaited."""
    answers = behaviour(request, context)
    if inspect.isawaitable(answers):
        await answers
        return
    # Closed at once when the client goes away, not when the garbage collector finds it.
    async with aclosing(answers):
        async for answer in cast("AsyncIterator[Any]", answers):
            await context.write(answer)


def _request_id(request: Any, context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY:
            return value.decode(errors="replace") if isinstance(value, bytes) else value
    return str(getattr(getattr(request, "ref", request), "request_id", ""))
