"""Speculative decoding: drafters in the published dialects, proposals, verification, budget.

Knows no wire. A drafter proposes, the target verifies; what is emitted is always the target's own
sample, so a wrong proposal costs time and nothing else.
"""
