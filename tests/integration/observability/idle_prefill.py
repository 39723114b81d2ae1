"""A prefill worker that takes grants of a decode worker and sends no rows, or damaged ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, Self

import grpc
import numpy as np
import pytest

from kvbraid.transport.frame import FrameHeader, encode_head
from kvbraid.transport.push_service import PUSH
from kvbraid.transport.wire import grant_from_proto
from kvbraid.v1 import decode_pb2, decode_pb2_grpc, generation_pb2


class IdlePrefill:
    """A context manager; target: host:port of the decode worker."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._numbers = itertools.count()
        self._calls: list[Any] = []
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for call in self._calls:
            call.cancel()
        self._channel.close()

    def take_grant(self, num_tokens: int) -> Any:
        """The call that waits for a prompt of so many tokens, and its grant."""
        number = next(self._numbers)
        request = decode_pb2.DecodeRequest(
            ref=generation_pb2.RequestRef(request_id=f"idle-{number}", sender_incarnation=1),
            token_ids=[5 + (number + i) % 290 for i in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=4, seed=1),
            expect_handoff=True,
        )
        call = self._stub.Decode(request, timeout=120)
        self._calls.append(call)
        return call, grant_from_proto(next(call).grant)

    def hold(self, lengths: Sequence[int]) -> None:
        """Take grants for prompts of these lengths; and again, whenever their leases have ended."""
        calls = [self.take_grant(num_tokens)[0] for num_tokens in lengths]
        threading.Thread(target=self._hold_again, args=(calls, lengths), daemon=True).start()

    def _hold_again(self, calls: Sequence[Any], lengths: Sequence[int]) -> None:
        while not self._is_over.is_set():
            for call in calls:
                # Ends with the lease, or with this object.
                call.code()
            try:
                calls = [self.take_grant(num_tokens)[0] for num_tokens in lengths]
            except (grpc.RpcError, ValueError):  # refused, or the channel was closed
                calls = []

    def send_damaged(self, grant: Any) -> None:
        """Push one row of the grant whose payload is not what its checksum says."""
        layout, endpoint = grant.layout, grant.endpoints[0]
        payload = bytes(layout.row_bytes)
        header = FrameHeader(
            src_rank=0, dst_rank=0, transfer_id=grant.transfer_id,
            incarnation=grant.incarnation, generation=grant.generation, number=0,
            layer_start=0, num_layers=1, head_start=0, num_heads=1, num_positions=1,
            payload_bytes=len(payload),
        )  # fmt: skip
        positions = np.asarray([grant.first_position], np.int32)
        frame = encode_head(header, positions, payload) + b"\x01" + payload[1:]
        with (
            grpc.insecure_channel(endpoint.address) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            channel.stream_unary(PUSH)(iter([frame]), timeout=20)
        assert refused.value.code() is grpc.StatusCode.DATA_LOSS  # type: ignore[attr-defined]
