"""Which backend is tried first, by what was measured.

A regime depends on the heads of a DCP group together, not on those of a rank: gathering queries
over c ranks makes c times as many rows share each read of the KV.
"""

from __future__ import annotations

from dataclasses import dataclass

MLA = "mla"
GQA = "gqa"

_ANY = "any"
_MANY = 1 << 30
_H200 = "benchmarks/results/attention_h200.json"


@dataclass(frozen=True, slots=True)
class Preference:
    """Backends, best first, on one kind of GPU for one kind of attention and some head counts."""

    architecture: str
    kind: str
    widened_heads: range
    backends: tuple[str, ...]
    source: str


# The first row that applies counts.
PREFERENCES = (
    Preference(
        "sm90",
        MLA,
        range(1, 64),
        ("triton", "flashinfer", "torch"),
        f"{_H200}: ours / FlashInfer fa3 0.42-0.97 at 16 heads, 0.54-1.00 at 32",
    ),
    Preference(
        "sm90",
        MLA,
        range(64, _MANY),
        ("flashinfer", "triton", "torch"),
        f"{_H200}: ours / FlashInfer fa3 1.01-1.05 at 64 heads batched (0.71-0.77 at batch 1), "
        "1.10-1.14 at 128 heads with short sequences (0.85-0.96 at batch 1 and 8 x 128K)",
    ),
    Preference(
        "sm90",
        GQA,
        range(1, _MANY),
        ("triton", "flashinfer", "torch"),
        f"{_H200}: ours / FlashInfer 0.94-1.00 at 32/8 heads of 128, 0.81-0.98 at 9/3 of 64",
    ),
    Preference(
        "gfx950", MLA, range(1, _MANY), ("triton", "aiter", "torch"), "not measured: ours first"
    ),
    Preference(
        _ANY,
        MLA,
        range(1, _MANY),
        ("triton", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "flashinfer", "torch"),
        "not measured: ours first, then vendors' kernels that tests here can only imitate",
    ),
    Preference(
        _ANY,
        GQA,
        range(1, _MANY),
        ("triton", "flashinfer", "torch"),
        "not measured: ours first",
    ),
)


def preference(kind: str, architecture: str | None, widened_heads: int) -> Preference:
    """The row for `kind` ("mla" or "gqa") on a GPU; architecture as in accelerator.Accelerator,
    None without a GPU. Head counts below 1 count as 1."""
    heads = max(1, widened_heads)
    return next(
        row
        for row in PREFERENCES
        if row.kind == kind
        and row.architecture in (architecture, _ANY)
        and heads in row.widened_heads
    )
