"""Settings of a draft service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbraid.errors import ConfigError
from kvbraid.settings import ModelSettings, ServerSettings, setting


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The drafter, its memory and what one message may bring."""

    drafter: str = setting("", "Drafter checkpoint, made for --model.")
    max_draft_tokens: int = setting(
        0, "Most drafts of a proposal; 0: as many as the drafter was trained for.", unit="tokens",
        minimum=0, maximum=64,
    )  # fmt: skip
    draft_kv_tokens: int = setting(
        0, "Tokens that the KV pool holds; 0: max_sequences full contexts, within "
        "draft_memory_fraction.", unit="tokens", minimum=0,
    )  # fmt: skip
    draft_memory_fraction: float = setting(
        0.3, "Part of the free memory that the KV pool may take.", minimum=0.01, maximum=0.98
    )
    max_sequences: int = setting(
        128, "Most sequences held at once, and most of one step.", unit="sequences", minimum=1
    )
    max_workers: int = setting(
        64, "Most decode workers that are remembered at once.", unit="workers", minimum=1
    )
    step_port: int = setting(
        0, "TCP port for the steps of decode workers, beside gRPC's and with its certificates; 0: "
        "any free port.", minimum=0, maximum=65535,
    )  # fmt: skip
    max_rows_per_message: int = setting(
        1024, "Most fused rows of one message.", unit="rows", minimum=1, maximum=1 << 20
    )
    batch_window_ms: float = setting(
        0.3, "Longest that a step waits for those of other workers.", unit="milliseconds",
        minimum=0, maximum=10,
    )  # fmt: skip
    ingest_wait_ms: float = setting(
        20.0, "Longest that a step waits for rows of a prompt that a prefill worker pushes.",
        unit="milliseconds", minimum=0, maximum=10000,
    )  # fmt: skip
    open_wait_ms: float = setting(
        5000.0, "Longest that a prefill worker's rows wait for the decode worker's grant.",
        unit="milliseconds", minimum=0, maximum=600000,
    )  # fmt: skip
    lease_seconds: float = setting(
        20.0, "A grant for which no rows come for this long is given up, and so are the sequences "
        "of a decode worker without a stream.", unit="seconds", minimum=0.1,
    )  # fmt: skip
    cuda_graphs: Literal["auto", "always", "never"] = setting(
        "auto",
        "Replay draft steps as CUDA graphs; auto: on GPUs where nothing stands against it; always: "
        "the service refuses to start otherwise.",
    )
    compute_threads: int = setting(
        0, "CPU threads of the drafter; 0: one a core.", unit="threads", minimum=0
    )

    def require_drafter(self) -> str:
        """The checkpoint's path. Raises ConfigError when none is given."""
        if not self.drafter:
            raise ConfigError("drafter is not set; accepted: the folder of a drafter checkpoint")
        return self.drafter


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A service that proposes tokens for the running sequences of decode workers."""

    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
