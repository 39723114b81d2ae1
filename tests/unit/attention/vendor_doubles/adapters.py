"""The adapters under test, each over its double."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from attention import accelerator
from attention.backends.aiter_mla import AiterBackend
from attention.backends.base import AttentionBackend
from attention.backends.cutedsl_mla import CuteDslMlaBackend
from attention.backends.flashinfer_backend import FlashInferBackend
from attention.backends.tokenspeed_mla import TokenspeedMlaBackend
from attention.backends.trtllm_mla import TrtllmMlaBackend
from tests.unit.attention.vendor_doubles.aiter_double import AiterDouble
from tests.unit.attention.vendor_doubles.flashinfer_double import flashinfer_double
from tests.unit.attention.vendor_doubles.recording import BASE_2, BASE_E, Record, install
from tests.unit.attention.vendor_doubles.tokenspeed_double import TokenspeedDouble
from tests.unit.attention.vendor_doubles.trtllm_double import NUM_SMS, TrtllmDouble

# (monkeypatch, base of the double's lse or None for the documented one) -> the recorded calls
Installer = Callable[[pytest.MonkeyPatch, float | None], list[Record]]


@dataclass(frozen=True)
class Adapter:
    """page_sizes: some that the kernel takes; base: of its lse, as documented."""

    make: Callable[[], AttentionBackend]
    install: Installer
    page_sizes: tuple[int, ...]
    base: float


def _install_trtllm(monkeypatch: pytest.MonkeyPatch, base: float | None) -> list[Record]:
    double = TrtllmDouble(None if base is None else {"trtllm-gen": base, "cute-dsl": base})
    name = "trtllm_batch_decode_with_kv_cache_mla"
    install(monkeypatch, "flashinfer.mla", {name: getattr(double, name)})
    monkeypatch.setattr(accelerator, "num_multiprocessors", lambda device: NUM_SMS)
    return double.calls


def _install_tokenspeed(monkeypatch: pytest.MonkeyPatch, base: float | None) -> list[Record]:
    double = TokenspeedDouble(BASE_2 if base is None else base)
    members = {"tokenspeed_mla_decode": double.tokenspeed_mla_decode}
    install(monkeypatch, "tokenspeed_mla", members)
    monkeypatch.setattr(accelerator, "num_multiprocessors", lambda device: NUM_SMS)
    return double.calls


def _install_aiter(monkeypatch: pytest.MonkeyPatch, base: float | None) -> list[Record]:
    double = AiterDouble(BASE_E if base is None else base)
    install(monkeypatch, "aiter.ops.triton.gluon.mla_gluon", {"mla_gluon": double.mla_gluon})
    return double.calls


def _install_flashinfer(monkeypatch: pytest.MonkeyPatch, base: float | None) -> list[Record]:
    top, mla, calls = flashinfer_double(BASE_2 if base is None else base)
    install(monkeypatch, "flashinfer.mla", mla)
    install(monkeypatch, "flashinfer", top)
    return calls


ADAPTERS = {
    "flashinfer": Adapter(FlashInferBackend, _install_flashinfer, (1, 16, 64), BASE_2),
    "trtllm_mla": Adapter(TrtllmMlaBackend, _install_trtllm, (32, 64), BASE_2),
    "cutedsl_mla": Adapter(CuteDslMlaBackend, _install_trtllm, (2, 32, 128), BASE_E),
    "tokenspeed_mla": Adapter(TokenspeedMlaBackend, _install_tokenspeed, (32, 64), BASE_2),
    "aiter": Adapter(AiterBackend, _install_aiter, (1, 16, 64), BASE_E),
}
