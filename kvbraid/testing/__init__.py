"""Fakes for tests of programs that use KVBraid: workers without a model, and a network that fails.

async with FakeCluster() as cluster:
    # A real coordinator (python -m coordinator, or in this process) can be pointed at them.
    cluster.prefill_workers, cluster.decode_workers
"""

from __future__ import annotations

from kvbraid.testing.fake_cluster import FakeCluster
from kvbraid.testing.fake_decode import FakeDecodeWorker
from kvbraid.testing.fake_prefill import FakePrefillWorker
from kvbraid.testing.fake_worker import Fault
from kvbraid.testing.lossy_proxy import LossyProxy
from kvbraid.testing.toy_model import ToyModel

__all__ = [
    "FakeCluster",
    "FakeDecodeWorker",
    "FakePrefillWorker",
    "Fault",
    "LossyProxy",
    "ToyModel",
]
