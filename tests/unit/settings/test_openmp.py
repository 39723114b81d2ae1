"""Children that share their cores do not spin away the time of the others."""

from __future__ import annotations

import pytest

from kvbraid.settings.openmp import with_brief_spinning


def test_spin_count_is_short_and_everything_else_stays() -> None:
    environment = with_brief_spinning({"PATH": "/bin"})
    assert environment.pop("GOMP_SPINCOUNT") == "1000"
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_set_stays(name: str) -> None:
    assert with_brief_spinning({name: "7"}) == {name: "7"}
