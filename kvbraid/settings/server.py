"""Where a process listens and how it speaks: the section that every service has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbraid.address import is_any_host
from kvbraid.errors import ConfigError
from kvbraid.settings.fields import ByteSize, setting
from kvbraid.settings.tls import TlsSettings


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where a process listens, how it drains and what it says."""

    host: str = setting(
        "127.0.0.1",
        "Address that every server of this process listens on; 0.0.0.0 is all of IPv4, :: all of "
        "IPv4 and IPv6.",
    )
    port: int = setting(
        0, "gRPC port; 0 lets the system choose and the ready file tell.", minimum=0, maximum=65535
    )
    advertise_host: str = setting(
        "", "Host name that peers should use; empty: the listening address."
    )
    metrics_port: int = setting(
        0,
        "Port of the Prometheus endpoint /metrics; 0 lets the system choose.",
        minimum=0,
        maximum=65535,
    )
    health_port: int | None = setting(
        None, "Port for probes: grpc.health.v1 and nothing else, always in plaintext; empty: none; "
        "0 lets the system choose.", minimum=0, maximum=65535,
    )  # fmt: skip
    drain_seconds: float = setting(
        30.0, "Time that running requests get to finish after SIGTERM.", unit="seconds", minimum=0
    )
    max_message_bytes: ByteSize = setting(
        ByteSize(16 << 20),
        "Largest gRPC message accepted.",
        unit="bytes",
        minimum=65536,
        maximum=1 << 30,
    )
    keepalive_seconds: float = setting(
        1.0, "Silence after which a peer is pinged.", unit="seconds", minimum=0.1, maximum=3600
    )
    keepalive_timeout_seconds: float = setting(
        1.0,
        "Unanswered ping after which the connection is dropped.",
        unit="seconds",
        minimum=0.1,
        maximum=3600,
    )
    reflection: bool = setting(True, "Serve gRPC reflection.")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe log record that is written."
    )
    ready_file: str = setting(
        "", "Written once the process serves: one JSON line with its addresses. Empty: none."
    )
    parent_pid: int = setting(
        0, "Process whose end ends this one at once; 0: none. Linux only.", minimum=0
    )
    tls: TlsSettings = field(default_factory=TlsSettings)

    @property
    def reachable_host(self) -> str:
        """The host name that peers use. Raises ConfigError when it cannot be known."""
        if self.advertise_host:
            return self.advertise_host
        if is_any_host(self.host):
            raise ConfigError(f"host is {self.host}: advertise_host must say how peers reach it")
        return self.host
