"""What it takes to capture a drafter's steps, and who launches them: the one place that chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attention.dispatch import AttentionChoice, AttentionNeeds, choose
from kvbraid.model.graph_capture import GraphCapture
from kvbraid.speculative.captured_drafting import CapturedDraftForward
from kvbraid.speculative.draft_compute import DraftCompute
from kvbraid.speculative.draft_forward import DraftForward, EagerDraftForward
from kvbraid.speculative.draft_kv import DraftKv


@dataclass(frozen=True, slots=True)
class DraftGraphs:
    """capture: of the drafter's device. max_len: most rows that a sequence is given before it
    drafts. choose_attention: finds a backend for needs that say that decode is captured."""

    capture: GraphCapture
    max_len: int
    choose_attention: Callable[[AttentionNeeds], AttentionChoice] = choose

    def attention_for(self, needs: AttentionNeeds) -> AttentionChoice:
        """A backend whose decode can be captured. Raises UnsupportedCombination."""
        return self.choose_attention(replace(needs, cuda_graphs=True))


def draft_forward(compute: DraftCompute, kv: DraftKv, graphs: DraftGraphs | None) -> DraftForward:
    """Captured with `graphs`, eager without."""
    if graphs is None:
        return EagerDraftForward(compute, kv)
    return CapturedDraftForward(compute, kv, graphs.capture, graphs.max_len)
