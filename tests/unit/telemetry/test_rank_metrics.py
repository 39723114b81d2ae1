"""Rank 0 shows every rank of its worker, and which ones do not answer."""

from __future__ import annotations

import urllib.request
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from prometheus_client import generate_latest

from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.metrics import WorkerMetrics


def scrape(metrics: WorkerMetrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


@pytest.fixture
def ranks():
    """Rank 0 that follows ranks 1 and 2, and their endpoints."""
    workers = [WorkerMetrics("decode", rank=rank) for rank in range(3)]
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(MetricsEndpoint(w.rank.registry, host="127.0.0.1", port=0))
            for w in workers[1:]
        ]
        workers[0].all_ranks.follow({i: e.address for i, e in enumerate(endpoints, start=1)})
        yield workers, endpoints


def test_rank_0_shows_all_ranks_in_one_family(ranks) -> None:
    workers, _ = ranks
    for rank, worker in enumerate(workers):
        worker.rank.free_memory_bytes.set(100 + rank)
        worker.rank.exchange_seconds("a2a").observe(1e-4)
    lines = scrape(workers[0])
    assert [line for line in lines if line.startswith("kvbraid_rank_free_memory_bytes{")] == [
        f'kvbraid_rank_free_memory_bytes{{rank="{rank}"}} {100 + rank}.0' for rank in range(3)
    ]
    assert 'kvbraid_rank_exchange_seconds_count{exchange="a2a",rank="2"} 1.0' in lines
    types = [line for line in lines if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))


def test_other_ranks_are_asked_past_a_proxy(ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, _ = ranks
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # of a test before
    assert 'kvbraid_rank_up{rank="1"} 1.0' in scrape(workers[0])


def test_what_rank_0_alone_knows_is_not_counted_for_each_rank(ranks) -> None:
    workers, _ = ranks
    for worker in workers:
        worker.engine.running_sequences.set(4)
    running = [line for line in scrape(workers[0]) if "engine_running_sequences " in line]
    assert running[-1] == "kvbraid_engine_running_sequences 4.0"
    assert len([line for line in running if not line.startswith("#")]) == 1


def test_a_rank_that_does_not_answer_is_seen_and_the_others_stay(ranks, caplog) -> None:
    workers, endpoints = ranks
    workers[2].rank.free_memory_bytes.set(7)
    assert 'kvbraid_rank_up{rank="1"} 1.0' in scrape(workers[0])
    endpoints[0]._server.shutdown()
    endpoints[0]._server.socket.close()
    for _ in range(2):
        lines = scrape(workers[0])
        up = [line for line in lines if line.startswith("kvbraid_rank_up{")]
        assert [line[-3:] for line in up] == ["1.0", "0.0", "1.0"]
    assert 'kvbraid_rank_free_memory_bytes{rank="2"} 7.0' in lines
    assert caplog.text.count("rank 1 does not answer") == 1


def test_a_rank_that_answers_nonsense_counts_as_gone(ranks) -> None:
    workers, _ = ranks
    with HTTPServer(("127.0.0.1", 0), Nonsense) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        workers[0].all_ranks.follow({1: f"127.0.0.1:{server.server_port}"})
        assert 'kvbraid_rank_up{rank="1"} 0.0' in scrape(workers[0])
        server.shutdown()


class Nonsense(BaseHTTPRequestHandler):
    """Something else that listens on the port."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>kvbraid_rank_free_memory_bytes{</html>\n")

    def log_message(self, *_: object) -> None:
        pass
