"""The check before a worker serves tells a drafter that fits from one that does not.

Windows come from the exact loop with the trained drafters of tiny-mla.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbraid.model.loader import load_config
from kvbraid.request import DraftWindow, TokenChunk
from kvbraid.speculative.drafter import load_drafter
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from kvbraid.speculative.tap_fusion import TapFusion, load_tap_fusion
from kvbraid.worker.drafter_check import DrafterCheck
from tests.unit.speculative.drafters.exact_loop import TransformersTarget, verified_windows
from tools.chat_prompt import chat_prompt_ids

ASSETS = Path(__file__).parents[2] / "assets"
MODEL = ASSETS / "tiny-mla"
NUM_WINDOWS = 12
both_kinds = pytest.mark.parametrize("kind", ["eagle3", "dspark"])


class OneSlotLate(Proposer):
    """Each draft is meant for the position before its own."""

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer]:
        answers = super().step(tasks)
        return [
            Proposal((*answer.token_ids[1:], 0)) if isinstance(answer, Proposal) else answer
            for answer in answers
        ]


class OtherLayers(TapFusion):
    """Reads the layers that it was trained for in another order."""

    def __init__(self, fusion: TapFusion) -> None:
        self.__dict__.update(fusion.__dict__)
        self.tap_layers = fusion.tap_layers[::-1]


class Noise(TapFusion):
    """As if fc had never been loaded."""

    def __init__(self, fusion: TapFusion) -> None:
        self.__dict__.update(fusion.__dict__)

    def fuse(self, taps: Tensor) -> Tensor:
        return torch.randn(len(taps), self.fused_width, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    torch.set_num_threads(1)
    return TransformersTarget(MODEL)


def checked(
    target: TransformersTarget,
    kind: str,
    proposer: type[Proposer] = Proposer,
    fusion: type[OtherLayers | Noise] | None = None,
) -> DrafterCheck:
    path = ASSETS / f"tiny-mla-{kind}"
    own = load_tap_fusion(path, load_config(MODEL))
    drafter = proposer(load_drafter(path, MODEL), num_kv_tokens=512, max_sequences=1)
    prompt = chat_prompt_ids(MODEL, "Tell me a story about a cat.")
    windows = verified_windows(
        target, own if fusion is None else fusion(own), drafter, prompt, NUM_WINDOWS
    )
    check = DrafterCheck()
    check.add(TokenChunk((5,), (), None))  # the prompt's own token is no window
    for window in windows:
        verified = DraftWindow(drafter.max_draft_tokens, window.accepted)
        check.add(TokenChunk((5,), (), None, (verified,)))
    assert check.num_windows == NUM_WINDOWS
    return check


@both_kinds
def test_a_drafter_of_this_target_passes(
    target: TransformersTarget, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    check = checked(target, kind)
    assert check.acceptance_length > 2
    assert not check.is_low
    with caplog.at_level(logging.INFO):
        check.log()
    ours = [record for record in caplog.records if record.name == "kvbraid.worker.drafter_check"]
    assert [record.levelno for record in ours] == [logging.INFO]


@both_kinds
def test_row_4_drafts_one_slot_late_are_told(
    target: TransformersTarget, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang 30261: acceptance length 1.1 instead of 4."""
    check = checked(target, kind, OneSlotLate)
    assert check.acceptance_length < 1.5
    check.log()
    assert "hardly ever agrees" in caplog.text


@both_kinds
def test_row_8_taps_in_another_order_are_told(
    target: TransformersTarget, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang 32334, vllm 43671: acceptance length 1.0. Layers of tiny-mla resemble each other: some
    drafts still come true, and with ids that are all one off as many as a weak drafter has. Against
    those stand the loaders (dialects/test_drafter_bug_log.py)."""
    check = checked(target, kind, fusion=OtherLayers)
    assert check.is_low
    check.log()
    assert caplog.text


@both_kinds
def test_row_9_a_tensor_that_was_left_random_is_told(target: TransformersTarget, kind: str) -> None:
    """sglang 27829: acceptance length 1.0."""
    assert checked(target, kind, fusion=Noise).is_suspicious


def test_without_windows_nothing_is_claimed(caplog: pytest.LogCaptureFixture) -> None:
    check = DrafterCheck()
    assert not check.is_suspicious
    check.log()
    assert "not checked" in caplog.text
