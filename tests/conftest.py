"""How property tests run: a busy machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")
