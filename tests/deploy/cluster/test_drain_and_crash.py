"""Pods that are deleted finish what they do; pods that die are replaced and lose nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.outsider import Call, Outsider
from tests.deploy.cluster.pod import Pod
from tests.deploy.cluster.references import long_prompts
from tests.deploy.cluster.test_requests import GRPC

# The first test of the folder waits for the whole cluster.
pytestmark = pytest.mark.timeout(300)

# Seconds of decoding on any machine, so that they are still running when a pod is told to end.
_MANY = 400


def long_streams(client: Outsider, number: int) -> list[Call]:
    """Streams that have begun. All of them get the same tokens."""
    prompt = long_prompts()[0].prompt_ids
    calls = [
        client.call("generate", target=GRPC, prompt_ids=prompt, max_tokens=_MANY)
        for _ in range(number)
    ]
    for call in calls:
        assert next(iter(call))["tokens"]
    return calls


def check_whole(calls: list[Call]) -> None:
    for call in calls:
        assert call.rest()[-1] == {"end": "OK"}
        assert len(call.tokens) == _MANY
    assert all(call.tokens == calls[0].tokens for call in calls)
    wanted = long_prompts()[0].output_ids
    assert calls[0].tokens[: len(wanted)] == wanted


def num_draining(pod: Pod) -> int:
    """Calls that it was serving when it was told to end."""
    lines = pod.log.read_text(encoding="utf-8").splitlines()
    (draining,) = (json.loads(line) for line in lines if '"msg": "draining"' in line)
    return int(draining["num_running"])


def check_drained(pod: Pod) -> None:
    """SIGTERM, not ready, what it was serving ended by itself, all within the grace."""
    (told,), (ended,) = pod.times("SIGTERM"), pod.times("exited")
    unready = [at for at in pod.times("readiness failed") if at > told]
    assert unready, "the probe did not see the drain"
    assert told < unready[0] < ended
    assert num_draining(pod) > 0, "nothing was running any more"
    assert not pod.times("SIGKILL")
    assert [event.detail for event in pod.events if event.what == "exited"] == ["0"]
    assert ended - pod.times("deleted")[0] < pod.spec.spec["terminationGracePeriodSeconds"]


def test_deleted_pods_finish_their_streams(settled: Cluster, client: Outsider) -> None:
    calls = long_streams(client, 4)
    coordinator, decode = settled.ready("coordinator")[0], busy(settled, client, "decode")
    for pod in (coordinator, decode):
        pod.delete()
    num_connections = len(settled.node.ask("connections"))
    assert client.results("incarnations", target=GRPC, channels=4)
    check_whole(calls)
    for pod in (coordinator, decode):
        assert pod.gone.wait(30), settled.states()
        check_drained(pod)
    targets = {target for _, _, target, _ in settled.node.ask("connections")[num_connections:]}
    assert targets
    assert coordinator.address not in targets, "it still got connections"


def rank_pid(pod: Pod, rank: int) -> int:
    """The process of a rank."""
    wanted = f"RANK={rank}".encode()
    (found,) = (
        pid
        for pid in pod.sandbox.pids()
        if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    return found


def busy(cluster: Cluster, client: Outsider, component: str) -> Pod:
    """A pod of the role that runs sequences, which it does soon after their first tokens."""

    def is_running(pod: Pod) -> bool:
        (page,) = client.results("get", url=f"http://{pod.address}:9090/metrics")
        values = [line.split() for line in page["text"].splitlines()]
        return any(v[0] == "kvbraid_engine_running_sequences" and float(v[1]) for v in values)

    found: list[Pod] = []

    def look() -> bool:
        found.extend(pod for pod in cluster.ready(component) if is_running(pod))
        return bool(found)

    cluster.wait(look, 20, f"a {component} pod is busy")
    return found[0]


def test_a_killed_rank_restarts_its_container_and_loses_no_token(
    settled: Cluster, client: Outsider
) -> None:
    calls = long_streams(client, 4)
    pod = busy(settled, client, "decode")
    os.kill(rank_pid(pod, 1), signal.SIGKILL)
    check_whole(calls)
    settled.wait(lambda: pod.num_restarts == 1 and pod.is_ready, 60, "it is ready again")
    (exited,) = (event for event in pod.events if event.what == "exited")
    assert exited.detail not in ("0", "-9"), "its rank 0 must say that another rank failed"
    names = [event.what for event in pod.events]
    again = names[names.index("exited") :]
    assert again.index("not ready") < again.index("started") < again.index("startup succeeded")
    assert settled.ready("decode").count(pod) == 1


def test_a_killed_rank_replaces_its_whole_group(settled: Cluster, client: Outsider) -> None:
    leader, other = settled.ready("prefill")
    os.kill(rank_pid(other, 1), signal.SIGKILL)
    settled.wait(lambda: leader.gone.is_set() and other.gone.is_set(), 60, "the group ends")
    # Meanwhile decode workers compute prompts themselves.
    wanted = long_prompts()[5]
    call = client.call(
        "generate",
        target=GRPC,
        prompt_ids=wanted.prompt_ids,
        max_tokens=len(wanted.output_ids),
    )
    assert call.rest()[-1] == {"end": "OK"}
    assert call.tokens == wanted.output_ids
    settled.settle(60)
    assert {pod.spec.name for pod in settled.ready("prefill")} == {
        leader.spec.name,
        other.spec.name,
    }
    assert not {pod.address for pod in settled.ready("prefill")} & {leader.address, other.address}
