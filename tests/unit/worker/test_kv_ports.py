"""The KV data port of a rank."""

from __future__ import annotations

import pytest

from kvbraid.errors import ConfigError
from kvbraid.settings import ServerSettings, TransferSettings
from kvbraid.settings.fields import ByteSize
from kvbraid.worker.kv_ports import KvPorts

ONE_MIB = ByteSize(1 << 20)


@pytest.mark.parametrize("mover", ["auto", "grpc_push"])
def test_slots_whose_frames_fit_into_no_message_are_refused(mover: str) -> None:
    """Every handoff would fail, and decode workers would compute all prompts without a word."""
    transfer = TransferSettings(kv_mover=mover, staging_slot_bytes=ONE_MIB)  # type: ignore[arg-type]
    server = ServerSettings(max_message_bytes=ONE_MIB)
    says = "staging_slot_bytes is 1048576, accepted with max_message_bytes 1048576: up to 986832"
    with pytest.raises(ConfigError, match=says):
        KvPorts(rank=1, incarnation=1, transfer=transfer, server=server)
