"""Bucket bounds of histograms, in the unit of the metric's name."""

from __future__ import annotations

# 1 ms to 10 minutes: an idle CPU worker and a queued 1M-token prompt both resolve. An SLO threshold
# for the time to the first token must be one of these.
REQUEST_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
# Of a token or a step. An SLO threshold for the time between tokens must be one of these.
TOKEN_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
EXCHANGE_BUCKETS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0)
LENGTH_BUCKETS = (
    1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288,
    1048576,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
# Tokens of one verified window: the anchor's successor and what was accepted before it.
WINDOW_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
