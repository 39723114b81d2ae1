"""Settings of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbraid.address import split_address
from kvbraid.errors import ConfigError
from kvbraid.settings import ByteSize, ServerSettings, setting

# Of a worker list's entry that stands for every address of a name.
DNS_PREFIX = "dns:"
# A stream that its deadline ends has this long to tell its client so.
_LAST_ANSWER_S = 30.0
# gRPC takes milliseconds in a C int.
_MAX_MS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What clients may ask for and how long they may wait."""

    model: str = setting("", "Hugging Face folder or GGUF file or folder, for its tokenizer.")
    served_model_name: str = setting("", "Name that clients ask for; empty: the workers' own.")
    http_port: int = setting(
        0, "Port of the OpenAI-compatible HTTP API; 0 lets the system choose.", minimum=0,
        maximum=65535,
    )  # fmt: skip
    max_http_body_bytes: ByteSize = setting(
        ByteSize(16 << 20), "Largest HTTP request body.", unit="bytes", minimum=1024,
        maximum=1 << 30,
    )  # fmt: skip
    max_prompts_per_request: int = setting(
        64, "Most prompts of one /v1/completions request.", unit="prompts", minimum=1
    )
    request_timeout_seconds: float = setting(
        600.0, "Longest life of a request; a client's own deadline may be shorter.",
        unit="seconds", minimum=0.1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Which workers there are and how requests are spread over them."""

    prefill_workers: list[str] = setting(
        [], "Prefill workers, host:port each; dns:host:port stands for every address of host."
    )
    decode_workers: list[str] = setting([], "Decode workers, written like prefill workers.")
    poll_seconds: float = setting(
        1.0, "Time between two looks at how full a worker is.", unit="seconds", minimum=0.05
    )
    local_prefill_max_tokens: int = setting(
        16, "Prompts with at most this many tokens outside the decode worker's cache are computed "
        "by the decode worker itself.", unit="tokens", minimum=0,
    )  # fmt: skip
    prefill_fallback: bool = setting(
        True, "Compute prompts on the decode worker while no prefill worker is up."
    )
    max_queued_requests: int = setting(
        64, "Requests that may wait for one decode worker beyond those it runs.",
        unit="requests", minimum=0,
    )  # fmt: skip
    affinity_load_factor: float = setting(
        1.25, "A worker with a cached prefix is preferred up to this multiple of the mean load.",
        minimum=1.0,
    )  # fmt: skip
    prefix_index_blocks: int = setting(
        65536, "64-token blocks whose places are remembered.", unit="blocks", minimum=0
    )
    max_attempts: int = setting(
        4, "Most attempts of one request, the first included.", unit="attempts", minimum=1
    )
    recovery_seconds: float = setting(
        3.0, "Time that requests wait for a worker that went down to come back.", unit="seconds",
        minimum=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("prefill_workers", "decode_workers"):
            for worker in getattr(self, name):
                split_address(worker.removeprefix(DNS_PREFIX), f"one of {name}")


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How long clients keep a connection, so that they spread over several coordinators."""

    max_connection_age_seconds: float = setting(
        0.0, "Age at which clients are told to open a new connection; up to a tenth more or less; "
        "0: never.", unit="seconds", minimum=0, maximum=2_000_000,
    )  # fmt: skip
    max_connection_age_grace_seconds: float = setting(
        0.0, "How long calls of a connection that reached its age may go on before they are cut; "
        "at least request_timeout_seconds; 0: that and 30 s more.", unit="seconds", minimum=0,
        maximum=2_000_000,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The front door: takes requests over gRPC and HTTP and places them on workers."""

    server: ServerSettings = field(default_factory=ServerSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)

    def __post_init__(self) -> None:
        grace_s = self.connections.max_connection_age_grace_seconds
        longest_s = self.api.request_timeout_seconds
        if 0 < grace_s < longest_s:
            raise ConfigError(
                f"max_connection_age_grace_seconds is {grace_s}, accepted: 0 or at least "
                f"request_timeout_seconds {longest_s}, or requests would be cut"
            )

    def connection_options(self) -> list[tuple[str, int]]:
        """gRPC server options that limit the age of connections; none where it is unlimited."""
        age_s = self.connections.max_connection_age_seconds
        if age_s == 0:
            return []
        grace_s = self.connections.max_connection_age_grace_seconds
        grace_s = grace_s or self.api.request_timeout_seconds + _LAST_ANSWER_S
        return [
            ("grpc.max_connection_age_ms", max(1, round(age_s * 1000))),
            ("grpc.max_connection_age_grace_ms", min(_MAX_MS, round(grace_s * 1000))),
        ]
