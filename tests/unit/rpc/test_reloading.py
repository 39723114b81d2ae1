"""Files that change under a running process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbraid.errors import ConfigError
from kvbraid.rpc.reloading import Reloaded


class Pair:
    """Two files that fit when they say the same."""

    def __init__(self, directory: Path) -> None:
        self.first, self.second = directory / "first", directory / "second"
        self.num_made = 0
        self.write("1", "1")

    def write(self, first: str, second: str) -> None:
        self.first.write_text(first)
        self.second.write_text(second)

    def make(self) -> str:
        self.num_made += 1
        texts = {path.read_text() for path in (self.first, self.second)}
        if len(texts) != 1:
            raise ConfigError(f"they differ: {sorted(texts)}")
        return texts.pop()

    def reloaded(self) -> Reloaded[str]:
        return Reloaded([str(self.first), str(self.second)], self.make)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_nothing_is_made_again_while_nothing_changes(pair: Pair) -> None:
    reloaded = pair.reloaded()
    assert reloaded.current() is reloaded.current()
    assert pair.num_made == 1


def test_half_a_renewal_leaves_the_old_with_one_warning(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    reloaded = pair.reloaded()
    pair.write("22", "1")
    assert [reloaded.current() for _ in range(3)] == ["1"] * 3
    assert [record.message for record in caplog.records] == [
        "changed files are not used, the old ones still are: they differ: ['1', '22']"
    ]
    pair.write("22", "22")
    assert reloaded.current() == "22"


def test_what_cannot_be_used_yet_is_tried_again(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate of an issuer whose clock is ahead: the files do not change any more."""
    now_s, is_valid = 0.0, False

    def make() -> str:
        if now_s and not is_valid:
            raise ConfigError("not yet valid")
        return pair.make()

    reloaded = Reloaded([str(pair.first), str(pair.second)], make, clock=lambda: now_s)
    pair.write("22", "22")
    for _ in range(4):
        now_s += 9.0
        assert reloaded.current() == "1"
    assert len(caplog.records) == 1, "told once"
    is_valid = True
    now_s += 0.5
    assert reloaded.current() == "1", "not at every call"
    now_s += 9.0
    assert reloaded.current() == "22"
    assert reloaded.fault() == ""


def test_a_fault_is_told_while_it_lasts(pair: Pair) -> None:
    reloaded = pair.reloaded()
    assert reloaded.fault() == ""
    pair.write("22", "1")
    assert [reloaded.fault() for _ in range(2)] == ["they differ: ['1', '22']"] * 2
    assert reloaded.current() == "1"
    pair.write("333", "333")
    assert (reloaded.fault(), reloaded.current()) == ("", "333")


def test_a_file_that_vanishes_and_returns(pair: Pair, tmp_path: Path) -> None:
    def make() -> str:
        if not pair.first.exists():
            raise ConfigError("there is none")
        return pair.first.read_text()

    reloaded = Reloaded([str(pair.first)], make)
    pair.first.rename(tmp_path / "away")
    assert reloaded.current() == "1"
    (tmp_path / "new").write_text("3")
    (tmp_path / "new").rename(pair.first)
    assert reloaded.current() == "3"


def test_a_link_that_is_switched_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces the files of a Secret: all at once, behind a link."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    link = tmp_path / "data"
    link.symlink_to("old")
    path = link / "file"
    reloaded = Reloaded([str(path)], path.read_text)
    assert reloaded.current() == "old"
    (tmp_path / "data.new").symlink_to("new")
    (tmp_path / "data.new").rename(link)
    assert reloaded.current() == "new"


def test_files_replaced_while_they_are_read_are_read_again(pair: Pair) -> None:
    """What was made may be of the old first file and the new second one."""
    interruptions = ["late", ""]

    def make() -> str:
        text = pair.first.read_text()
        if text != "1" and (late := interruptions.pop(0)):
            pair.first.write_text(late)
        return text

    reloaded = Reloaded([str(pair.first)], make)
    pair.first.write_text("early")
    assert reloaded.current() == "1"
    assert reloaded.current() == "late"


def test_unusable_files_are_refused_to_begin_with(pair: Pair) -> None:
    pair.write("1", "2")
    with pytest.raises(ConfigError, match="they differ"):
        pair.reloaded()
