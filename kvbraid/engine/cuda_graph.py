"""CUDA (or HIP) graphs of torch: all that is special about capturing on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch


class CudaGraphCapture:
    """Implements `kvbraid.model.graph_capture.GraphCapture`. Used by one thread only.

    All graphs share one memory pool: they are replayed one after the other on one stream, and what
    they leave behind lies in tensors that are not of the pool.
    """

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """See GraphCapture. `compute` runs twice: what is compiled, connected or allocated for good
        by the first run must not be met by a capture."""
        compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The worker's other threads use the GPU meanwhile (memory gauges, NCCL's watchdog); only
        # this thread's calls are held to what a capture allows.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        return graph.replay
