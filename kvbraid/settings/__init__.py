"""Configuration: flags over environment over file over defaults, unknown keys refused.

A service declares a frozen dataclass, usually made of the shared sections, and loads it once:

    @dataclass(frozen=True, slots=True)
    class DecodeConfig:
        server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50053))
        model: ModelSettings = field(default_factory=ModelSettings)
        idle_seconds: float = setting(5.0, "Longest idle time.", unit="seconds", minimum=0)

    config = load_settings(DecodeConfig, argv, role="decode")

Nesting is for code only: outside, every setting has a flat name (`--port`, KVBRAID_DECODE_PORT
or KVBRAID_PORT, `port = 50053` in the file or in its `[decode]` table).
"""

from __future__ import annotations

from kvbraid.settings.fields import ByteSize, setting
from kvbraid.settings.loader import ROLES, load_settings, models_directory
from kvbraid.settings.sections import (
    KvSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    SpeculativeSettings,
    TransferSettings,
)
from kvbraid.settings.server import ServerSettings
from kvbraid.settings.tls import TlsSettings, tls_from_environment

__all__ = [
    "ROLES",
    "ByteSize",
    "KvSettings",
    "ModelSettings",
    "ParallelSettings",
    "SchedulerSettings",
    "ServerSettings",
    "SpeculativeSettings",
    "TlsSettings",
    "TransferSettings",
    "load_settings",
    "models_directory",
    "setting",
    "tls_from_environment",
]
