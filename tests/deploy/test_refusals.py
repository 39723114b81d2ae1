"""`helm template` refuses values that cannot work, with a sentence that says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import CHART, HELMS, Values, example, refusal, run_helm

CUDA = {"image_variant": "cuda", "accelerator": "nvidia.com/gpu"}


def decode(settings: Values | None = None, **values: Any) -> Values:
    return {"decode": {"settings": settings or {}, **values}}


SERVING = {"tls_certificate": "/x/tls.crt", "tls_private_key": "/x/tls.key"}
HEALTH: Values = {
    role: {"settings": {"health_port": 8081}} for role in ("prefill", "decode", "draft")
}

SENTENCES: list[tuple[Values, str]] = [
    ({"settings": {"model": ""}}, "settings.model is empty: name the folder"),
    ({"settings": {"model": "/elsewhere/x"}}, "not below model_volume.mount_path /models"),
    ({"model_volume": {"kind": "none"}}, "model_volume.pull fills a claim"),
    ({"model_volume": {"kind": "host_path", "pull": ""}}, "host_path must name a folder"),
    ({"model_volume": {"kind": "image", "pull": ""}}, "must be a reference to an OCI image"),
    (decode({"tp_size": 3}), "decode.settings.dcp_size 2 must divide tp_size 3"),
    (
        decode({"tp_size": 4}, hosts_per_worker=3),
        "tp_size 4 cannot be spread evenly over decode.hosts_per_worker 3",
    ),
    (
        decode({"communicator": "shared_memory"}, hosts_per_worker=2),
        "communicator is shared_memory, but its ranks are on 2 hosts",
    ),
    (decode({"exchange": "fused"}, hosts_per_worker=2), "exchange is fused, which writes into"),
    (decode({"kv_mover": "shared_memory"}), "pods share no memory: use auto or grpc_push"),
    (decode({"draft_wire": "local_socket"}), "pods share no sockets: use auto, tcp or grpc"),
    (decode({"page_size": 16, "interleave": 3}), "interleave 3 must divide page_size 16"),
    (decode({"max_model_len": 9000}), "max_model_len 9000 does not fit into kv_cache_tokens 8192"),
    (
        decode({"metrics_port": 50052}),
        "the ranks take 50052 to 50053 for metrics and 50053 to 50054 for calls",
    ),
    ({"coordinator": {"settings": {"http_port": 50051}}}, "http_port and port are both 50051"),
    (decode({"port": 1}, hosts_per_worker=2), "decode.settings.port 1 is too low"),
    ({"coordinator": {"settings": {"http_port": 9090}}}, "metrics_port are both 9090"),
    (decode(accelerator="nvidia.com/gpu"), "but decode.image_variant is cpu"),
    (decode(image_variant="rocm", accelerator="nvidia.com/gpu"), "but decode.image_variant is roc"),
    (decode({"device": "cpu"}, **CUDA), "device is cpu, but decode.accelerator asks for GPUs"),
    (decode({"device": "cuda:0"}), "device is cuda:0, but decode.accelerator is empty"),
    (decode({"communicator": "nccl"}), "nccl, which needs GPUs, but decode.accelerator is empty"),
    (decode({"advertise_host": "x"}, replicas=2), "advertise_host is one name for several pods"),
    (decode(max_surge=0, max_unavailable=0), "both 0: no pod could ever be replaced"),
    (decode(replicas=0), "nothing could answer a request"),
    (
        {"prefill": {"replicas": 0}, "coordinator": {"settings": {"prefill_fallback": False}}},
        "there is no prefill worker",
    ),
    (
        {"coordinator": {"settings": {"max_connection_age_grace_seconds": 90}}},
        "max_connection_age_grace_seconds 90 would cut requests, which may take "
        "request_timeout_seconds 600",
    ),
    (decode(autoscaling={"kind": "hpa"}), "reserved_pages must say how many pages"),
    (
        decode(autoscaling={"kind": "keda", "min_replicas": 5}),
        "max_replicas 4 is below min_replicas 5",
    ),
    ({"draft": {"replicas": 1}}, "draft.settings.drafter is empty"),
    (
        {"draft": {"replicas": 1, "settings": {"drafter": "/models/d", "step_port": 50054}}},
        "draft.settings.step_port 50054 is port, metrics_port or health_port too",
    ),
    (
        {"draft": {"replicas": 1, "settings": {"drafter": "/models/d"}}}
        | decode({"drafter": "/models/d"}),
        "decode has settings.drafter /models/d, but draft.replicas is above 0",
    ),
    ({"tls": {"server_name": "kv"}}, "server_name is kv, but tls.secret_name is empty"),
    ({"tls": {"cert_manager": {"issuer_name": "ca"}}}, "name the Secret that cert-manager writes"),
    (
        {"tls": {"secret_name": "s", "front_secret_name": "s"}},
        "tls.front_secret_name and tls.secret_name are both s",
    ),
    (
        {"coordinator": {"settings": SERVING}},
        "coordinator.settings.tls_certificate is set, but health_port is not",
    ),
    (
        decode(SERVING | {"health_port": 8081}),
        "decode serves over TLS, but coordinator calls it in plaintext",
    ),
    (
        {"coordinator": {"settings": {"tls_server_ca": "/x/ca.crt"}}},
        "coordinator calls prefill over TLS, but prefill serves in plaintext",
    ),
    (
        {"tls": {"secret_name": "s"}} | decode({"tls_certificate": "", "tls_private_key": ""}),
        "coordinator calls decode over TLS, but decode serves in plaintext",
    ),
    (
        {
            "settings": SERVING | {"tls_client_ca": "/x/ca", "tls_server_ca": "/x/ca"},
            "coordinator": {"settings": {"tls_certificate": "", "tls_client_ca": ""}},
        }
        | HEALTH,
        "prefill asks callers for a certificate, but coordinator has none",
    ),
    (decode({"health_port": 50054}), "one of the ports 50053 to 50054 that the ranks take for cal"),
    (
        decode({"health_port": 9091}),
        "one of the ports 9090 to 9091 that the ranks take for metrics",
    ),
    (
        {"coordinator": {"settings": {"health_port": 8080}}},
        "coordinator.settings.health_port and http_port are both 8080",
    ),
]

# What the schema alone refuses, and what it then names.
MISFITS: list[tuple[Values, str]] = [
    (decode({"page_sise": 16}), "page_sise"),
    (decode({"port": 0}), "port"),
    (decode({"port": "50053"}), "port"),
    (decode({"max_message_bytes": "16 pounds"}), "max_message_bytes"),
    (decode({"exchange": "magic"}), "exchange"),
    ({"settings": {"http_port": 8080}}, "http_port"),
    ({"draft": {"hosts_per_worker": 2}}, "hosts_per_worker"),
    ({"image": {"tag": "latest"}}, "tag"),
    ({"image": {"digests": {"cpu": "sha256:abc"}}}, "cpu"),
    (decode(replicaCount=2), "replicaCount"),
    ({"pod_security": {"run_as_user": 0}}, "run_as_user"),
    ({"coordinator": {"replicas": 0}}, "replicas"),
    ({"monitoring": {"slo": {"ttft_seconds": 3}}}, "ttft_seconds"),
    (decode({"health_port": 0}), "health_port"),
    ({"tls": {"secretName": "s"}}, "secretName"),
    ({"tls": {"secret_name": "Upper"}}, "secret_name"),
    ({"tls": {"cert_manager": {"issuer_kind": "Cluster"}}}, "issuer_kind"),
    ({"tls": {"cert_manager": {"duration": "90 days"}}}, "duration"),
    ({"prefil": {}}, "prefil"),
]


@pytest.mark.parametrize(("values", "sentence"), SENTENCES, ids=[s for _, s in SENTENCES])
def test_a_sentence_says_why(values: Values, sentence: str) -> None:
    assert sentence in refusal(example("laptop-cpu"), values=values)


@pytest.mark.parametrize(("values", "name"), MISFITS, ids=[name for _, name in MISFITS])
def test_the_schema_is_strict(values: Values, name: str) -> None:
    message = refusal(example("laptop-cpu"), values=values)
    assert name in message
    assert "schema" in message


@pytest.mark.parametrize("helm_name", HELMS)
def test_both_helms_refuse(helm_name: str) -> None:
    for values, words in (SENTENCES[0], MISFITS[0]):
        assert words in refusal(example("laptop-cpu"), values=values, name=helm_name)


def test_image_volumes_need_kubernetes_1_31() -> None:
    code, _, err = run_helm(
        "helm4",
        *("template", "kv", str(CHART), "--kube-version", "1.30.0"),
        *("--values", str(example("rocm"))),
    )
    assert code != 0
    assert "1.30.0 has no image volumes" in err
