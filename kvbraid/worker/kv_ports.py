"""One rank's KV data port: what it receives into and what it sends from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvbraid.errors import ConfigError
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, TransferSettings
from kvbraid.transport.frame import largest_payload
from kvbraid.transport.grant import RankEndpoint
from kvbraid.transport.grants import GrantTable
from kvbraid.transport.push_service import SERVICE_NAME, push_handlers
from kvbraid.transport.receiver import KvReceiver
from kvbraid.transport.sender import KvSender
from kvbraid.transport.staging import SharedMemory, StagingRing, remove_stale_rings


class KvPorts:
    """Receiver and sender of one rank."""

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        transfer: TransferSettings,
        server: ServerSettings,
    ) -> None:
        """Raises ConfigError where a slot is larger than what comes in one message."""
        slot_bytes, most = transfer.staging_slot_bytes, largest_payload(server.max_message_bytes)
        if transfer.kv_mover != "shared_memory" and slot_bytes > most:
            raise ConfigError(
                f"staging_slot_bytes is {slot_bytes}, accepted with max_message_bytes "
                f"{server.max_message_bytes}: up to {most}, so that a frame fits into a message"
            )
        if rank == 0:
            remove_stale_rings()
        memory = SharedMemory(slot_bytes) if transfer.kv_mover != "grpc_push" else None
        self._ring = StagingRing(transfer.staging_slots, slot_bytes, memory)
        self._channels = ChannelPool(server)
        self.receiver = KvReceiver(
            grants=GrantTable(rank=rank, incarnation=incarnation), ring=self._ring
        )
        self.sender = KvSender(
            rank=rank,
            channels=self._channels.channel,
            mover_choice=transfer.kv_mover,
            max_frame_bytes=most,
        )

    def add_to(self, server: RpcServer) -> None:
        """Serve KvTransferService on `server`."""
        server.add_generic(push_handlers(self.receiver), SERVICE_NAME)

    def endpoint(self, address: str) -> RankEndpoint:
        """Where this rank takes rows when its server listens at `address`."""
        return self.receiver.endpoint(address)

    def on_landed(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a frame waits for the engine."""
        self.receiver.on_landed = wake

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Push inside the block; afterwards give up what is unfinished and unlink the ring."""
        await self.sender.start()
        try:
            yield
        finally:
            await self.sender.stop()
            await self._channels.close()
            self._ring.close()
