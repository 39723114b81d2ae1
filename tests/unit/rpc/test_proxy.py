"""Proxies in the environment, as developers' machines and containers have them."""

from __future__ import annotations

from typing import Any

import pytest

from kvbraid.rpc.channels import ChannelPool
from kvbraid.settings import ServerSettings
from kvbraid.v1 import decode_pb2, decode_pb2_grpc


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_calls_between_processes_pass_it_by(
    loopback: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """gRPC would ask it for 127.0.0.1, and KV and prompts would go through it."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with ChannelPool(ServerSettings()) as pool:
        stub = decode_pb2_grpc.DecodeServiceStub(pool.channel(loopback.server.address))
        assert (await stub.Abort(decode_pb2.AbortRequest(), timeout=5)).found
