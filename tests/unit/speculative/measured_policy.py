"""A policy that has measured all prices, and what it is told of a step."""

from __future__ import annotations

from kvbraid.speculative.draft_plan import StepOutcome
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.verify_budget import best_width


def measured_policy(batch: int = 1) -> tuple[DraftPolicy, list[int]]:
    """A policy that knows all prices: rows are nearly free, drafts are cheap."""
    policy = DraftPolicy(3, width_rule=best_width, drafts_in_blocks=False)
    for _ in range(3):
        for width in range(1, 5):
            policy.costs.observe_step(batch, width, 1.0 + 0.01 * (width - 1), has_prompt_rows=False)
        for drafts in range(1, 4):
            policy.costs.draft.observe(batch, drafts, 0.05 * drafts)
    policy.costs.observe_step(batch, 1, 1.0, has_prompt_rows=False)
    return policy, [policy.open() for _ in range(batch)]


def outcome(slots: list[int], **changes: object) -> StepOutcome:
    fields: dict[str, object] = {
        "slots": slots,
        "width": 4,
        "num_verified": [3],
        "num_accepted": [0],
        "confidences": [[]],
        "num_asked": 3,
        "num_drafting": 1,
        "draft_seconds": 0.15,
        "step_seconds": 1.03,
        "has_prompt_rows": False,
    }
    return StepOutcome(**{**fields, **changes})  # type: ignore[arg-type]
