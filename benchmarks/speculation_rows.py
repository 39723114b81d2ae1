"""What the pairs of a speculation benchmark come to: rates against bars, drafts, equal tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.report import BenchmarkRow
from benchmarks.service_streams import DraftCounts, Sample

Pairs = Sequence[tuple[Sample, Sample]]
"""(plain, drafted) of each round."""


def control_row(case: str, pairs: Pairs) -> BenchmarkRow:
    """The second plain cluster's rate over the first one's: what may differ where nothing does."""
    ratios = [ours.rate / peer.rate for peer, ours in pairs]
    peer, ours = (
        statistics.median(sample.rate for sample in side) for side in zip(*pairs, strict=True)
    )
    title = f"{case}: tokens/s of a second plain cluster / plain, median of {len(pairs)} pairs"
    return _barred(title, ours, peer, statistics.median(ratios), None)


def rows_of(
    case: str, pairs: Pairs, *, bar: float | None, floor: float | None, is_exact: bool
) -> list[BenchmarkRow]:
    """Rates against plain decoding and against bars, then what was drafted for them.

    bar: of the median. floor: of all pairs together. is_exact: tokens must be equal."""
    plain, drafted = zip(*pairs, strict=True)
    ratio = statistics.median(ours.rate / peer.rate for peer, ours in pairs)
    ours, peer = (statistics.median(s.rate for s in side) for side in (drafted, plain))
    title = f"{case}: tokens/s with drafts / plain"
    rows = [_barred(f"{title}, median of {len(pairs)} pairs", ours, peer, ratio, bar)]
    whole, plain_whole = _whole_rate(drafted), _whole_rate(plain)
    rows.append(
        _barred(
            f"{title}, all pairs with what was learnt in them",
            whole,
            plain_whole,
            whole / plain_whole,
            floor,
        )
    )
    first_plain, first = pairs[0]
    rows.append(
        _barred(
            f"{title}, first pair",
            first.rate,
            first_plain.rate,
            first.rate / first_plain.rate,
            None,
        )
    )
    return [*rows, *_draft_rows(case, drafted), _equality(case, pairs, is_exact=is_exact)]


def _whole_rate(samples: Sequence[Sample]) -> float:
    return sum(s.num_tokens for s in samples) / sum(s.seconds for s in samples)


def _draft_rows(case: str, drafted: Sequence[Sample]) -> Iterator[BenchmarkRow]:
    counts = DraftCounts.of(drafted)
    num_tokens = sum(sample.num_tokens for sample in drafted)
    rows = counts.num_verified + counts.num_windows
    for what, ours, peer in (
        ("acceptance length: tokens / windows", counts.acceptance_length * counts.num_windows,
         counts.num_windows),
        ("accepted / verified drafts", counts.num_accepted, counts.num_verified),
        ("steps with drafts / steps of all streams", counts.num_windows, counts.num_steps),
        ("verify tokens / tokens emitted", rows, num_tokens),
    ):  # fmt: skip
        yield _barred(f"{case}: {what}", ours, peer, ours / max(1, peer), None)


def _equality(case: str, pairs: Pairs, *, is_exact: bool) -> BenchmarkRow:
    # With the first plain cluster's: those of a second one follow.
    streams = [
        a.token_ids == b.token_ids
        for plain, drafted in pairs
        for a, b in zip(plain.streams[: len(drafted.streams)], drafted.streams, strict=True)
    ]
    bar = 1.0 if is_exact else None
    equal, share = sum(streams), sum(streams) / len(streams)
    return _barred(f"{case}: streams with equal tokens", equal, len(streams), share, bar)


def _barred(case: str, ours: float, peer: float, ratio: float, bar: float | None) -> BenchmarkRow:
    return BenchmarkRow(case, ours, peer, ratio, bar, bar is None or ratio >= bar)
