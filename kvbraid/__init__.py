"""KVBraid: long-context language models as separately scaled gRPC services."""

from __future__ import annotations

__version__ = "0.1.0"
