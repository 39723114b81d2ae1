"""A receiving rank of its own: prints its endpoint, reads a grant, prints when rows land."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

from prometheus_client import CollectorRegistry

from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import RpcMetrics
from kvbraid.transport.grants import Grant, GrantTable
from kvbraid.transport.push_service import SERVICE_NAME, push_handlers
from kvbraid.transport.receiver import KvReceiver
from kvbraid.transport.staging import SharedMemory, StagingRing

SLOT_BYTES = 512


async def main() -> None:
    """Serve until killed."""
    grants = GrantTable(rank=0, incarnation=77)
    receiver = KvReceiver(grants=grants, ring=StagingRing(4, SLOT_BYTES, SharedMemory(SLOT_BYTES)))
    server = RpcServer(
        role="decode",
        settings=ServerSettings(host="127.0.0.1", port=0),
        metrics=RpcMetrics(CollectorRegistry()),
    )
    server.add_generic(push_handlers(receiver), SERVICE_NAME)
    await server.start()
    sys.stdout.write(json.dumps(asdict(receiver.endpoint(server.address))) + "\n")
    sys.stdout.flush()
    grant = Grant.from_json(json.loads(await asyncio.to_thread(sys.stdin.readline)))
    grants.open(grant)
    told = False
    while True:
        receiver.poll(lambda header, positions, payload: None, 1 << 20)
        if not told and receiver.rows_landed(grant.transfer_id):
            told = True
            sys.stdout.write("landed\n")
            sys.stdout.flush()
        await asyncio.sleep(0.001)


asyncio.run(main())
