"""Every dashboard query has an answer while a real cluster works; a healthy one alerts nobody.

One look can fail on a machine that is busy with other things, so each test looks again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import pytest

from deploy.observability.files import DASHBOARDS
from deploy.observability.rules.alerts import ALERTS
from deploy.observability.rules.rule import Alert
from kvbraid.cluster.local_cluster import ClusterSpec
from kvbraid.cluster.worker_spec import WorkerSpec
from tests.integration.observability.load import Load
from tests.integration.observability.watched import (
    DRAFTER,
    LASTING,
    NEEDS_PROMETHEUS,
    PATIENT,
    SMALL,
    TINY_MLA,
    Watched,
    await_served,
    await_silence,
    lasting_authority,
    watched_cluster,
)
from tools.prometheus_server import Prometheus

POOL = f"kv_cache_tokens=4096,{SMALL}"
VARIABLES = {"$__rate_interval": "20s", "$namespace": ".*", "$instance": ".*"}
PATIENCE_S = 90.0

# Slow: shortened holds fire on a machine that is busy with other tests.
pytestmark = [NEEDS_PROMETHEUS, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    spec = ClusterSpec(
        model=str(TINY_MLA),
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{POOL}"),),
        decode=(WorkerSpec.parse("decode", f"tp=2,dcp=2,draft_policy=fixed,{PATIENT},{POOL}"),),
        draft=(WorkerSpec.parse("draft", f"drafter={DRAFTER},draft_kv_tokens=8192"),),
        coordinator=("--poll-seconds=0.2", "--served-model-name=tiny"),
        drain_seconds=5.0,
    )
    folder = tmp_path_factory.mktemp("observability")
    tls = lasting_authority(folder).mutual("service", ends=LASTING)
    with watched_cluster(folder, spec, tls=tls) as watched:
        yield watched


@pytest.fixture(scope="module", autouse=True)
def load(watched: Watched) -> Iterator[Load]:
    with watched.load() as load:
        await_served(watched.prometheus)
        yield load


def eventually(found: Callable[[], object], wanted: object) -> None:
    """Looks until it finds what is wanted; at last the difference fails the test."""
    give_up = time.monotonic() + PATIENCE_S
    while found() != wanted and time.monotonic() < give_up:
        time.sleep(1)
    assert found() == wanted


def has_number(prometheus: Prometheus, expr: str) -> bool:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return any(math.isfinite(value) for _, value in prometheus.query(expr))


@pytest.mark.parametrize("page", DASHBOARDS, ids=lambda page: page.name)
def test_every_query_returns_data(page, watched: Watched) -> None:
    silent = [(panel.title, query.expr) for panel in page.panels for query in panel.queries]
    assert silent

    def still_silent() -> list[tuple[str, str]]:
        nonlocal silent
        silent = [asked for asked in silent if not has_number(watched.prometheus, asked[1])]
        return silent

    eventually(still_silent, [])


def test_phases_add_up_to_the_time_to_the_first_token(watched: Watched) -> None:
    name = "kvbraid_coordinator"
    total = "avg_over_time({}_sum[10s])"
    share = (
        f"sum({total.format(f'{name}_ttft_phase_seconds')}) / "
        f"sum({total.format(f'{name}_time_to_first_token_seconds')})"
    )
    # Phases of a handoff are known a moment after its first token.
    close_to_one = [pytest.approx(1, abs=0.05)]
    eventually(lambda: [value for _, value in watched.prometheus.query(share)], close_to_one)


def test_every_rank_is_seen_through_rank_0(watched: Watched) -> None:
    def seen() -> list[tuple[str, str, float]]:
        up = watched.prometheus.query("kvbraid_rank_up")
        return sorted((labels["instance"], labels["rank"], value) for labels, value in up)

    eventually(seen, [("decode-0", "0", 1), ("decode-0", "1", 1), ("prefill-0", "0", 1)])

    def exchanging() -> set[str]:
        count = "kvbraid_rank_exchange_seconds_count > 0"
        return {labels["rank"] for labels, _ in watched.prometheus.query(count)}

    eventually(exchanging, {"0", "1"})


def test_a_healthy_cluster_alerts_nobody(watched: Watched) -> None:
    names = {rule.name for rule in ALERTS.rules if isinstance(rule, Alert)}
    # A machine that runs other tests too may be slow, and the tiny drafter does guess badly.
    budgets = {name for name in names if "Budget" in name}
    await_silence(watched.prometheus, names - budgets - {"KVBraidAcceptanceLow"})


def test_the_load_is_answered(load: Load) -> None:
    eventually(lambda: load.num_answers >= 10, True)
    assert load.errors == []
