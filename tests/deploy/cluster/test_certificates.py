"""The example with mutual TLS, started from what is rendered. By its name it runs, and ends, before
the larger cluster of the other tests starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbraid.testing.certificates import CertificateAuthority
from tests.deploy.charts import Values, by_kind, example, render
from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.outsider import Outsider
from tests.deploy.cluster.references import Reference, long_prompts
from tests.deploy.cluster.running import running_cluster
from tests.deploy.cluster.secret_volume import SecretData

# The first test waits for the cluster.
pytestmark = pytest.mark.timeout(300)

FRONT = "kv-kvbraid-coordinator.serving.svc:50051"
HEALTH_PORT = 8081
SECRET = "kvbraid-tls"
NUM_TOKENS = 8
VALUES: Values = {
    "settings": {"model": "/models/tiny-mla"},
    "model_volume": {"pull": "tiny-mla"},
    "coordinator": {"replicas": 1},
    "prefill": {"resources": {"limits": {"cpu": "1", "memory": "2Gi"}}},
}


class Issuer:
    """What cert-manager does with the rendered Certificate, and gives a client beside it."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder = folder
        self._names = names
        self.data, self.client = self.renewed()

    def renewed(self) -> tuple[SecretData, list[str]]:
        """The Secret's data, and a client's authority, key and certificate; all of them new."""
        folder = self._folder
        authority = CertificateAuthority(folder)
        service, client = authority.issue("service", hosts=self._names), authority.issue("client")
        files = {"tls.crt": service.certificate, "tls.key": service.private_key}
        self.data = {
            key: Path(path).read_bytes()
            for key, path in {**files, "ca.crt": authority.path}.items()
        }
        shown = (authority.path, client.private_key, client.certificate)
        self.client = [Path(path).read_text(encoding="utf-8") for path in shown]
        return self.data, self.client


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    (certificate,) = by_kind(render(example("mutual-tls"), values=VALUES), "Certificate")
    assert certificate["spec"]["secretName"] == SECRET
    return Issuer(tmp_path_factory.mktemp("issuer"), certificate["spec"]["dnsNames"])


@pytest.fixture(scope="module")
def secured(
    issuer: Issuer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Outsider]]:
    """The cluster and a pod of another namespace."""
    manifests = render(example("mutual-tls"), values=VALUES)
    folder = tmp_path_factory.mktemp("secured")
    with running_cluster(manifests, folder, secrets={SECRET: issuer.data}) as cluster:
        yield cluster, Outsider(cluster, "client", "clients")


def answer(client: Outsider, wanted: Reference, pem_texts: list[str]) -> tuple[list[int], str]:
    """Tokens, and how the call ended."""
    call = client.call(
        "generate",
        target=FRONT,
        prompt_ids=wanted.prompt_ids,
        max_tokens=NUM_TOKENS,
        pem_texts=pem_texts,
    )
    end = call.rest()[-1]["end"]
    return call.tokens, end.partition(":")[0]


def pushed_bytes(cluster: Cluster, client: Outsider) -> float:
    """KV that the prefill worker has handed over; without it, decode workers compute prompts."""
    (prefill,) = cluster.ready("prefill")
    (page,) = client.results("get", url=f"http://{prefill.address}:9090/metrics")
    name = 'kvbraid_handoff_bytes_total{direction="out",mover="grpc_push"} '
    (line,) = (line for line in page["text"].splitlines() if line.startswith(name))
    return float(line.removeprefix(name))


def test_probes_reach_readiness_over_the_plaintext_port(
    secured: tuple[Cluster, Outsider],
) -> None:
    cluster, _ = secured
    for component in ("coordinator", "prefill", "decode"):
        (pod,) = cluster.ready(component)
        assert pod.num_restarts == 0
        for kind in ("startup", "readiness", "liveness"):
            probe = pod.spec.probe(f"{kind}Probe")
            assert probe is not None
            assert probe["grpc"]["port"] == HEALTH_PORT


def test_a_request_streams_through_for_who_shows_a_certificate(
    secured: tuple[Cluster, Outsider], issuer: Issuer
) -> None:
    cluster, client = secured
    wanted = long_prompts()[0]
    assert answer(client, wanted, issuer.client) == (wanted.output_ids[:NUM_TOKENS], "OK")
    assert pushed_bytes(cluster, client) > 0
    assert answer(client, wanted, issuer.client[:1]) == ([], "UNAVAILABLE")
    assert answer(client, wanted, []) == ([], "UNAVAILABLE")


def test_a_renewed_secret_reaches_running_pods(
    secured: tuple[Cluster, Outsider], issuer: Issuer
) -> None:
    """Last: nothing of before is left, not even the authority."""
    cluster, client = secured
    before = issuer.client
    data, shown = issuer.renewed()
    cluster.renew_secret(SECRET, data)
    wanted, pushed = long_prompts()[1], pushed_bytes(cluster, client)
    assert answer(client, wanted, shown) == (wanted.output_ids[:NUM_TOKENS], "OK")
    assert pushed_bytes(cluster, client) > pushed
    assert answer(client, wanted, before) == ([], "UNAVAILABLE")
    assert all(pod.num_restarts == 0 for pod in cluster.running())
