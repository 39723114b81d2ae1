"""The image's HEALTHCHECK: exit code 0 while this container's service says SERVING.

The address comes from the ready file (setting `ready_file`), which a service writes once it serves.
It is that of the plaintext health service (setting `health_port`) where there is one: this check
speaks no TLS.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0
# Else http_proxy would be asked for this container's own address.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


def main() -> int:
    """Ask the overall health; every failure is one line on stderr and code 1."""
    ready_file = Path(os.environ["KVBRAID_READY_FILE"])
    if not ready_file.exists():
        sys.stderr.write(f"not ready: there is no {ready_file}\n")
        return 1
    report = json.loads(ready_file.read_text(encoding="utf-8"))
    address = report["health"] or report["grpc"]
    if report["tls"] and not report["health"]:
        sys.stderr.write(f"{address} serves over TLS: set health_port for this check\n")
        return 1
    try:
        with grpc.insecure_channel(address, options=_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        sys.stderr.write(f"{address} does not answer: {error}\n")
        return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    sys.stdout.write(f"{address} is {status}\n")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
