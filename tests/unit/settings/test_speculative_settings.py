from __future__ import annotations

import pytest

from decode_service.config import DecodeConfig
from draft_service.config import DraftConfig
from kvbraid.errors import ConfigError
from kvbraid.settings import load_settings
from prefill_service.config import PrefillConfig

REMOTE = ("--draft-worker=host:1", "--tap-fusion=/m")


@pytest.mark.parametrize("cls", [DecodeConfig, PrefillConfig])
def test_workers_take_a_drafter_or_a_draft_service(cls: type) -> None:
    assert load_settings(cls, (), {}, role="decode").speculative.drafter == ""
    assert load_settings(cls, ("--drafter=/m",), {}, role="decode").speculative.drafter == "/m"
    remote = load_settings(cls, REMOTE, {}, role="decode").speculative
    assert (remote.draft_worker, remote.tap_fusion) == ("host:1", "/m")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((*REMOTE, "--drafter=/m"), "accepted is one of them"),
        (("--draft-worker=host:1",), "accepted are both or none"),
        (("--tap-fusion=/m",), "accepted are both or none"),
        (("--draft-worker=host", "--tap-fusion=/m"), "accepted: host:port"),
        (("--draft-worker=:5", "--tap-fusion=/m"), "accepted: host:port"),
        ((*REMOTE, "--draft-verification=ratio_test"), "accepted is exact_match, or an embedded"),
        (("--draft-verification=block",), "exact_match, ratio_test"),
        (("--draft-profile-seconds=-1",), "draft_profile_seconds"),
        (("--max-draft-tokens=65",), "0 to 64"),
        (("--draft-timeout-ms=0",), "draft_timeout_ms"),
        (("--draft-timeout-ms=-1",), "draft_timeout_ms"),
        (("--draft-timeout-fraction=0",), "draft_timeout_fraction"),
        (("--draft-max-failures=0",), "draft_max_failures"),
        (("--draft-probe-seconds=0",), "draft_probe_seconds"),
    ],
)
def test_what_cannot_work_is_refused(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(DecodeConfig, argv, {}, role="decode")


def test_settings_of_workers_that_begin_with_draft_mean_nothing_to_a_draft_service() -> None:
    environ = {
        "KVBRAID_DRAFT_WORKER": "host:1",
        "KVBRAID_TAP_FUSION": "/m",
        "KVBRAID_DRAFT_TIMEOUT_MS": "7",
        "KVBRAID_DRAFT_KV_TOKENS": "64",
        "KVBRAID_DRAFT_PORT": "5",
    }
    service = load_settings(DraftConfig, (), environ, role="draft")
    assert (service.draft.draft_kv_tokens, service.server.port) == (64, 5)
    worker = load_settings(DecodeConfig, (), environ, role="decode")
    assert worker.speculative.draft_worker == "host:1"
    assert worker.speculative.draft_timeout_ms == 7
    assert (worker.speculative.draft_kv_tokens, worker.server.port) == (64, 0)
    with pytest.raises(ConfigError, match="draft has no setting colour"):
        load_settings(DraftConfig, (), {"KVBRAID_DRAFT_COLOUR": "red"}, role="draft")


def test_a_draft_service_needs_a_drafter() -> None:
    config = load_settings(DraftConfig, (), {}, role="draft")
    with pytest.raises(ConfigError, match="drafter is not set"):
        config.draft.require_drafter()
