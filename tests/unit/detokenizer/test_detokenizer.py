"""Text as it streams: whole characters, stop strings, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbraid.detokenizer import Detokenizer, StopScanner
from kvbraid.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "assets" / "tiny-mla")


def stream(ids: list[int], stop: tuple[str, ...] = (), min_tokens: int = 0) -> list[str]:
    """The pieces in order, the last one from `finish`."""
    detokenizer = Detokenizer(TOKENIZER, stop, min_tokens=min_tokens)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.finish()]


@given(st.lists(st.integers(0, 4095), max_size=40))
@settings(max_examples=400, deadline=None)
def test_pieces_of_any_tokens_join_to_their_decoding(ids: list[int]) -> None:
    assert "".join(stream(ids)) == TOKENIZER.decode(ids)


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_no_piece_of_a_valid_text_holds_half_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = stream(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_over_several_tokens_comes_with_its_last() -> None:
    ids = TOKENIZER.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    assert stream(ids) == [*[""] * (len(ids) - 1), "🙂", ""]


def test_an_unfinished_character_is_released_at_the_end() -> None:
    ids = TOKENIZER.encode("🙂", add_special_tokens=False)[:-1]
    assert stream(ids)[-1] == TOKENIZER.decode(ids) == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    ids = [1, *TOKENIZER.encode("Hi", add_special_tokens=False), 2]
    assert "".join(stream(ids)) == "Hi"


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
@settings(max_examples=400, deadline=None)
def test_stopping_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    by_character = ""
    for char in text:
        by_character += scanner.push(char)
        if scanner.found:
            break
    by_character += "" if scanner.found else scanner.finish()
    whole = StopScanner(stops)
    at_once = whole.push(text)
    at_once += "" if whole.found else whole.finish()
    assert (by_character, scanner.found) == (at_once, whole.found)
    assert by_character == stopped_at(text, stops)


def stopped_at(text: str, stops: list[str]) -> str:
    """The rule, spelled out: the first end of any stop string, the longest one that ends there."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


def test_a_possible_stop_string_is_withheld_and_released_when_it_is_none() -> None:
    scanner = StopScanner(["<end>"])
    assert [scanner.push(text) for text in ("a<", "en", "x", "<e", "nd>b")] == [
        "a", "", "<enx", "", "",
    ]  # fmt: skip
    assert scanner.found


def test_no_more_is_withheld_than_may_be_a_stop_string() -> None:
    scanner = StopScanner(["aab"])
    assert scanner.push("aaaaa") == "aaa"
    assert scanner.finish() == "aa"


def test_a_stop_string_over_token_borders_ends_the_text_before_it() -> None:
    ids = TOKENIZER.encode("One fish, two fish, red fish", add_special_tokens=False)
    pieces = stream(ids, stop=("o fish",))
    assert "".join(pieces) == "One fish, tw"
    assert len(pieces) < len(ids)


def test_stop_strings_count_only_after_min_tokens() -> None:
    ids = TOKENIZER.encode("a b a b a b", add_special_tokens=False)
    early = "".join(stream(ids, stop=("a",), min_tokens=len(ids) - 2))
    assert early == "a b a b "
    assert "".join(stream(ids, stop=("a",), min_tokens=len(ids))) == "a b a b a b"


@pytest.mark.parametrize("stop", ["é", "🙂"])
def test_stop_strings_may_be_characters_of_several_tokens(stop: str) -> None:
    ids = TOKENIZER.encode(f"x {stop} y", add_special_tokens=False)
    assert "".join(stream(ids, stop=(stop,))) == "x "
