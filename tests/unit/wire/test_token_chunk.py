"""Chunks of several steps keep what each step verified."""

from __future__ import annotations

import pytest

from kvbraid.request import DraftWindow, FinishReason, TokenChunk

PLAIN = TokenChunk((1, 2))
VERIFIED = TokenChunk((3, 4, 5), windows=(DraftWindow(4, 2),))


def test_plain_steps_have_no_windows() -> None:
    both = PLAIN.followed_by(PLAIN)
    assert both == TokenChunk((1, 2, 1, 2))
    assert both.steps == (DraftWindow(0, 0),) * 4


def test_plain_steps_beside_drafted_ones_are_windows_without_drafts() -> None:
    plain = (DraftWindow(0, 0),) * 2
    assert PLAIN.followed_by(VERIFIED).windows == (*plain, DraftWindow(4, 2))
    assert VERIFIED.followed_by(PLAIN).windows == (DraftWindow(4, 2), *plain)
    both = PLAIN.followed_by(VERIFIED)
    assert (both.num_drafts, both.num_accepted) == (4, 2)


@pytest.mark.parametrize(
    ("num_tokens", "windows"),
    [
        (1, ((0, 0),)),
        (2, ((0, 0), (0, 0))),
        (3, ((0, 0), (0, 0), (4, 1))),
        (4, ((0, 0), (0, 0), (4, 2))),
        (5, ((0, 0), (0, 0), (4, 2))),
        (6, ((0, 0), (0, 0), (4, 2), (4, 1))),
    ],
)
def test_drafts_behind_a_cut_came_true_for_nobody(
    num_tokens: int, windows: tuple[tuple[int, int], ...]
) -> None:
    """Steps of which no token is left are gone with what they verified."""
    chunk = PLAIN.followed_by(VERIFIED).followed_by(VERIFIED)
    cut = chunk.cut(num_tokens, FinishReason.STOP)
    assert cut.token_ids == chunk.token_ids[:num_tokens]
    assert cut.windows == tuple(DraftWindow(*window) for window in windows)
