"""`python -m tools.soak [--minutes 15] [--json FILE]`: a healthy cluster stays healthy.

Starts coordinator, prefill worker, two decode workers of which one has two ranks, a draft service
and a Prometheus with our rules as they are; keeps them mildly busy. Then no alert may have fired,
no record of level error be logged, no answer be wrong, nothing grow: memory, open files and
threads of every process; and once the clients have left, all pages are free or cached.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec
from tools.process_growth import Growth
from tools.prometheus_server import Prometheus
from tools.soak_load import SoakLoad

MODEL = Path("tests/assets/tiny-mla")
DRAFTER = Path("tests/assets/tiny-mla-eagle3")
# Most growth an hour: about 4 MiB, 2 files and 1 thread between the thirds of 12 minutes.
LIMITS = {"rss_mib": 30.0, "num_fds": 15.0, "num_threads": 8.0}
_SMALL = "kv_cache_tokens=4096,page_size=4,threads_per_rank=1"
_SAMPLE_S = 5.0
_SCRAPE_S = 5
# In the first part of the time clients hurry: caches, pools of pages and of threads, and the heaps
# then have the size that they keep.
_WARM_PART = 0.2
_HURRY = 4.0
_RETURN_S = 30.0
_HELD = 'sum(kvbraid_kv_pages{state=~"active|leased"}) + sum(kvbraid_draft_held_sequences)'


def spec(draft_timeout_ms: float) -> ClusterSpec:
    """What runs. draft_timeout_ms: on a machine that others load, the default is short."""
    patience = f"draft_timeout_ms={draft_timeout_ms:g},draft_timeout_fraction=100"
    decode = f"{patience},{_SMALL}"
    return ClusterSpec(
        model=str(MODEL),
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{_SMALL}"),),
        decode=(
            WorkerSpec.parse("decode", f"tp=2,dcp=2,{decode}"),
            WorkerSpec.parse("decode", f"tp=1,dcp=1,{decode}"),
        ),
        draft=(WorkerSpec.parse("draft", f"drafter={DRAFTER},draft_kv_tokens=8192"),),
        coordinator=("--served-model-name=tiny",),
    )


def soak(options: argparse.Namespace, folder: Path) -> list[BenchmarkRow]:
    """Run it; returns a row for everything that must hold. folder: for logs and data."""
    with LocalCluster(spec(options.draft_timeout_ms), folder / "logs") as cluster:
        cluster.start(timeout_s=120)
        reports = {"coordinator": cluster.coordinator, **cluster.workers}
        growth = Growth({name: child.pid for name, child in cluster.children.items()})
        targets = {name: report.metrics for name, report in reports.items()}
        with Prometheus(folder, targets, scrape_s=_SCRAPE_S) as prometheus:
            load = SoakLoad(
                cluster.coordinator.http, cluster.coordinator.grpc, "tiny",
                pause_s=options.pause_s,
            )  # fmt: skip
            with load:
                _watch(cluster, load, growth, options.minutes * 60)
            held = _held_at_last(prometheus)
            fired = prometheus.firing(f"{options.minutes + 5:.0f}m")
        rows = [*_answered(load), _none("alerts that fired", sorted(fired)),
                _none("pages and drafted sequences held without requests", held),
                *_grown(growth)]  # fmt: skip
        is_clean = cluster.stop()
    ended = [] if is_clean else ["a process had to be killed or ended early"]
    return [*rows, _none("unclean ends", ended), _none("error records", errors_in(folder / "logs"))]


def _watch(cluster: LocalCluster, load: SoakLoad, growth: Growth, seconds: float) -> None:
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        cluster.check()
        is_warm = elapsed >= _WARM_PART * seconds
        load.hurry = 1.0 if is_warm else _HURRY
        if is_warm:
            growth.take()
        time.sleep(_SAMPLE_S)


def _held_at_last(prometheus: Prometheus) -> list[str]:
    """What is still held once nothing runs; leases need a moment to end."""
    give_up = time.monotonic() + _RETURN_S
    while True:
        # Not an older scrape than the end of the load.
        time.sleep(_SCRAPE_S)
        ((_, held),) = prometheus.query(_HELD)
        if held == 0:
            return []
        if time.monotonic() > give_up:
            return [f"{held:g}"]


def _answered(load: SoakLoad) -> list[BenchmarkRow]:
    total = sum(load.counts.values())
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(load.counts.items()))
    return [
        BenchmarkRow(f"requests: {kinds}", total, 1.0, float(total), 1.0, total > 0),
        _none("requests that failed or were answered wrongly", load.errors),
        _reported("answers that an equal seed gave differently", load.num_seeded_differ),
    ]


def _grown(growth: Growth) -> list[BenchmarkRow]:
    rows = [_reported("cores used by the cluster", growth.cores())]
    for name in growth.names:
        rows.append(_reported(f"{name} rss_mib at the end", growth.last(name, "rss_mib")))
        for field, limit in LIMITS.items():
            found = growth.per_hour(name, field)
            rows.append(
                BenchmarkRow(
                    f"{name} {field} growth an hour, at most", found, limit, found / limit, limit,
                    found <= limit,
                )
            )  # fmt: skip
    return rows


def errors_in(folder: Path) -> list[str]:
    """Lines of logs that are records of level error or above, or no records at all."""
    found = []
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                level = json.loads(line)["level"]
            except (json.JSONDecodeError, TypeError, KeyError):
                level = "critical" if "Traceback" in line else "info"
            if logging.getLevelNamesMapping()[level.upper()] >= logging.ERROR:
                found.append(f"{path.name}: {line[:500]}")
    return found


def _none(what: str, found: list[str]) -> BenchmarkRow:
    shown = f": {json.dumps(found[:5])}" if found else ""
    return BenchmarkRow(f"{what}{shown}", float(len(found)), 0.0, 0.0, 0.0, not found)


def _reported(what: str, value: float) -> BenchmarkRow:
    return BenchmarkRow(what, value, 0.0, 0.0, None, holds=True)


def main(write: Callable[[str], object] = sys.stdout.write) -> int:
    """Run it once; exit code 1 when anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="how long; 15")
    parser.add_argument("--pause-s", type=float, default=1.5, help="mean pause of a client; 1.5")
    parser.add_argument("--draft-timeout-ms", type=float, default=500.0, help="of decode; 500")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvbraid-soak-"))
    write(f"logs and data: {folder}\n")
    rows = soak(options, folder)
    for row in rows:
        write(f"{'ok  ' if row.holds else 'FAIL'} {row.case}: {row.ours:.4g}\n")
    if options.json:
        write_report(options.json, f"soak of {options.minutes:g} minutes", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
