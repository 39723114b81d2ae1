"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbraid.settings import (
    KvSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    ServerSettings,
    SpeculativeSettings,
    TransferSettings,
)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A worker that holds the KV of running requests and generates their tokens."""

    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    kv: KvSettings = field(default_factory=KvSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)
