"""Requests through the front Service, over the edges that policies name."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.flows import Flow, flows
from tests.deploy.cluster.outsider import Outsider
from tests.deploy.cluster.references import long_prompts

# The first test of the folder waits for the whole cluster.
pytestmark = pytest.mark.timeout(300)

FRONT = "kv-kvbraid-coordinator.serving.svc"
GRPC, HTTP = f"{FRONT}:50051", f"http://{FRONT}:8080"

# Who calls whom, with every rank of a decode pod: tests/deploy/test_network_policies.py has what
# the chart allows.
EDGES = {
    ("coordinator", "prefill", 50052),
    ("coordinator", "decode", 50053),
    ("prefill", "decode", 50053),
    ("prefill", "decode", 50054),
    ("prefill", "draft", 50054),
    ("decode", "draft", 50054),
    ("decode", "draft", 50055),
}


def test_a_request_streams_through(settled: Cluster, client: Outsider) -> None:
    wanted = long_prompts()[0]
    call = client.call(
        "generate",
        target=GRPC,
        prompt_ids=wanted.prompt_ids,
        max_tokens=len(wanted.output_ids),
    )
    results = call.rest()
    assert results[-1] == {"end": "OK"}
    assert call.tokens == wanted.output_ids
    assert len(results) > 2, "it came in one piece"


def test_the_http_api_streams_through(settled: Cluster, client: Outsider) -> None:
    body = {"model": "tiny-mla", "prompt": "Once upon a time", "max_tokens": 8, "stream": True}
    *events, last = client.results("complete", url=f"{HTTP}/v1/completions", body=body)
    assert last == {"event": "[DONE]"}
    texts = [json.loads(event["event"])["choices"] for event in events]
    assert len(texts) > 2


def test_all_edges_are_used_and_no_others(settled: Cluster, client: Outsider) -> None:
    """Another one would not go through, and the fixture fails for whoever tries one."""
    calls = [
        client.call("generate", target=GRPC, prompt_ids=wanted.prompt_ids, max_tokens=4)
        for wanted in long_prompts()[1:5]
    ]
    assert [call.rest()[-1] for call in calls] == [{"end": "OK"}] * 4
    between = {
        (flow.source, flow.destination, flow.port)
        for flow in flows(settled)
        if flow.is_allowed and {flow.source, flow.destination} <= settled.controllers.keys()
    }
    # Hosts of the prefill worker meet on ports as they come.
    assert {edge for edge in between if edge[:2] != ("prefill", "prefill")} == EDGES
    assert any(edge[:2] == ("prefill", "prefill") for edge in between)


def test_an_edge_that_no_policy_has_is_closed_and_noticed(
    settled: Cluster, client: Outsider
) -> None:
    decode = settled.ready("decode")[0]
    (refused,) = client.results("connect", host=decode.address, port=50053)
    assert refused["error"]
    assert Flow("client", "decode", "TCP", 50053, is_allowed=False) in flows(settled)
    (reached,) = client.results("connect", host=decode.address, port=9090)
    assert reached["error"] == ""


def test_connections_spread_over_both_coordinators(settled: Cluster, client: Outsider) -> None:
    (found,) = client.results("incarnations", target=GRPC, channels=8)
    assert sorted(Counter(found["incarnations"]).values()) == [4, 4]
    assert all(name.startswith("coordinator:") for name in found["incarnations"])


def test_long_lived_channels_move_over(
    settled: Cluster, client: Outsider, connection_age_s: float
) -> None:
    """Three channels on two coordinators that take turns: not all of them can stay."""
    answers = client.results("incarnations", target=GRPC, channels=3, seconds=2 * connection_age_s)
    by_channel = list(zip(*(answer["incarnations"] for answer in answers), strict=True))
    assert len({name for names in by_channel for name in names}) == 2
    assert any(len(set(names)) == 2 for names in by_channel)
