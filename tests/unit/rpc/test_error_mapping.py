from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvbraid import errors
from kvbraid.errors import (
    DataLossError,
    InvalidRequestError,
    KVBraidError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.v1 import decode_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc

WIRE_ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type)
    and issubclass(cls, KVBraidError)
    and not issubclass(cls, errors.StartupError)
    and cls is not KVBraidError
]


def raising(error: BaseException) -> Any:
    def behaviour(_: Any) -> Any:
        raise error

    return behaviour


async def failing_stream(error: BaseException) -> AsyncIterator[Any]:
    yield decode_pb2.DecodeResponse(num_cached_tokens=1)
    raise error


@pytest.mark.parametrize("cls", WIRE_ERRORS)
async def test_every_error_class_arrives_as_itself_over_a_unary_call(
    loopback: Any, cls: type[KVBraidError]
) -> None:
    loopback.decode.on_abort = raising(cls("temperature is -1, accepted: 0 to 2"))
    message = r"^peer-7: temperature is -1, accepted: 0 to 2$"
    with pytest.raises(cls, match=message) as caught, translated_rpc_errors("peer-7"):
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    assert type(caught.value) is cls
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    assert cause.code().name == cls.grpc_code


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f41f"], ids=["ascii", "latin", "fish"])
async def test_a_long_message_is_cut_so_that_its_status_arrives(loopback: Any, letter: str) -> None:
    """Trailers have room for 8 KiB. Beyond, gRPC makes RESOURCE_EXHAUSTED of whatever it was."""
    loopback.decode.on_abort = raising(NotFoundError(f"model is {letter * 100_000}"))
    message = rf"^peer-7: model is {letter}{{300,2000}}\.\.\.$"
    with pytest.raises(NotFoundError, match=message), translated_rpc_errors("peer-7"):
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)


async def test_status_details_follow_google_rpc(loopback: Any) -> None:
    loopback.decode.on_abort = raising(OverloadedError("no pages", retry_after_s=2.5))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    status = rpc_status.from_call(caught.value)  # refuses a status that contradicts the code
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("OVERLOADED", "kvbraid")
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5


async def test_overload_and_field_survive_the_wire(loopback: Any) -> None:
    loopback.decode.on_abort = raising(OverloadedError("no pages", retry_after_s=0.25))
    with pytest.raises(OverloadedError) as overloaded, translated_rpc_errors("p"):
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    assert overloaded.value.retry_after_s == 0.25
    loopback.decode.on_abort = raising(InvalidRequestError("top_p is 0", field="top_p"))
    with pytest.raises(InvalidRequestError) as invalid, translated_rpc_errors("p"):
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    assert invalid.value.field == "top_p"


async def test_stream_delivers_what_it_yielded_before_the_error(loopback: Any) -> None:
    loopback.decode.on_decode = lambda _: failing_stream(DataLossError("row 3 is damaged"))
    call = loopback.stub.Decode(decode_pb2.DecodeRequest(), timeout=5)
    assert (await call.read()).num_cached_tokens == 1
    with pytest.raises(DataLossError, match="row 3"), translated_rpc_errors("p"):
        await call.read()


async def test_client_stream_and_bidi_calls_work_through_the_interceptor(loopback: Any) -> None:
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(loopback.channel)
    frames = [kv_transfer_pb2.PushRequest(frame=b"x") for _ in range(3)]
    assert (await stub.Push(iter(frames), timeout=5)).num_rows == 3
    slots = [kv_transfer_pb2.PushSharedRequest(num_slots_wanted=n) for n in (4, 9)]
    echoed = [list(a.free_slots) async for a in stub.PushShared(iter(slots), timeout=5)]
    assert echoed == [[4], [9]]


async def test_unexpected_exception_is_internal_and_logged_with_traceback(
    loopback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loopback.decode.on_abort = raising(ZeroDivisionError("secret detail"))
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    (record,) = [r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError]
    assert "Abort" in record.getMessage()


async def test_next_call_is_served_after_an_internal_error(loopback: Any) -> None:
    loopback.decode.on_abort = raising(ZeroDivisionError())
    with pytest.raises(grpc.aio.AioRpcError):
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    loopback.decode.on_abort = lambda _: decode_pb2.AbortResponse(found=True)
    assert (await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)).found


async def test_status_without_our_details_maps_by_code() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/x/y")
        with (
            pytest.raises(UnavailableError, match=r"^worker-1: "),
            translated_rpc_errors("worker-1"),
        ):
            await call(b"", timeout=5)


async def test_metrics_count_calls_by_code_and_errors_by_reason(loopback: Any) -> None:
    await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    loopback.decode.on_abort = raising(OverloadedError("no"))
    with pytest.raises(grpc.aio.AioRpcError):
        await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    method = "/kvbraid.v1.DecodeService/Abort"
    count = "kvbraid_rpc_requests_total"
    # A call is counted once its status is on its way, which may have reached the client by then.
    async with asyncio.timeout(5):
        while not loopback.sample(count, method=method, code="RESOURCE_EXHAUSTED"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert loopback.sample(count, method=method, code="OK") == 1
    assert loopback.sample(count, method=method, code="RESOURCE_EXHAUSTED") == 1
    assert (
        loopback.sample("kvbraid_rpc_errors_total", code="RESOURCE_EXHAUSTED", reason="OVERLOADED")
        == 1
    )
    assert loopback.sample("kvbraid_rpc_duration_seconds_count", method=method) == 2
    assert loopback.sample("kvbraid_rpc_in_flight_requests") == 0


async def test_bytes_that_are_no_message_are_the_clients_fault(loopback: Any) -> None:
    call = loopback.channel.unary_unary("/kvbraid.v1.DecodeService/Abort")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff", timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no request of /kvbraid.v1.DecodeService/Abort" in (caught.value.details() or "")
