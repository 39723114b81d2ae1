"""Loading, encoding and decoding, against the reference data and the tokenizers package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from kvbraid.errors import CheckpointError
from kvbraid.tokenizer import Tokenizer, load_tokenizer

ASSETS = Path(__file__).parents[2] / "assets"
TINY = ASSETS / "tiny-mla"
REFERENCE = ASSETS / "reference" / "tiny-mla-greedy.jsonl"

TINY_TOKENIZER = load_tokenizer(TINY)
ORACLE = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_facts_of_a_hugging_face_folder() -> None:
    facts = TINY_TOKENIZER.facts
    assert facts.vocab_size == 4096
    assert facts.eos_token_ids == (2,)
    assert facts.bos_token_id == 0
    assert facts.named_tokens["eos_token"] == "<|im_end|>"
    assert facts.chat_template is not None
    assert facts.chat_template.startswith("{% for message")
    assert TINY_TOKENIZER.special_ids == {0, 1, 2, 3, 4}


def test_reference_prompts_and_outputs_round_trip() -> None:
    rows = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
    assert len(rows) > 10
    for row in rows:
        assert TINY_TOKENIZER.decode(row["output_ids"]) == row["text"]
        text = TINY_TOKENIZER.decode(row["prompt_ids"], skip_special_tokens=False)
        assert TINY_TOKENIZER.encode(text, add_special_tokens=False) == row["prompt_ids"]


@given(st.lists(st.integers(0, 4095), max_size=30), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_tokens_decode_as_the_tokenizers_package_does(ids: list[int], skip: bool) -> None:
    expected = ORACLE.decode(ids, skip_special_tokens=skip)
    assert TINY_TOKENIZER.decode(ids, skip_special_tokens=skip) == expected


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = TINY_TOKENIZER.encode(text, add_special_tokens=False)
    assert ids == ORACLE.encode(text, add_special_tokens=False).ids
    assert TINY_TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert len(text) <= len(ids) * TINY_TOKENIZER.max_token_chars


def test_ids_outside_the_tokenizers_own_are_empty() -> None:
    assert TINY_TOKENIZER.token_bytes(10**6) == b""
    assert TINY_TOKENIZER.decode([10**6, 300]) == ORACLE.decode([300])


def copy_of_tiny(folder: Path, **config: object) -> Path:
    """The tiny-mla tokenizer with other values in its config files, keyed file__key."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder / name)
    (folder / "config.json").write_text('{"vocab_size": 4096, "eos_token_id": 2}')
    for key, value in config.items():
        name, _, field = key.partition("__")
        path = folder / f"{name}.json"
        content = json.loads(path.read_text())
        content[field] = value
        path.write_text(json.dumps(content))
    return folder


def test_end_tokens_are_the_union_of_what_the_files_say(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path, generation_config__eos_token_id=[4, 0])
    assert load_tokenizer(folder).facts.eos_token_ids == (0, 2, 4)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).facts.eos_token_ids == (2,)


@pytest.mark.parametrize(("add_bos", "first"), [(True, [0]), (False, []), (None, [])])
def test_plain_text_gets_bos_as_the_config_says(
    tmp_path: Path, add_bos: bool | None, first: list[int]
) -> None:
    tokenizer = load_tokenizer(copy_of_tiny(tmp_path, tokenizer_config__add_bos_token=add_bos))
    body = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello", add_special_tokens=True) == first + body
    marked = tokenizer.encode("<|endoftext|>Hello", add_special_tokens=True)
    assert marked == [0, *body]


def test_the_models_padded_vocabulary_is_valid(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copy_of_tiny(tmp_path, config__vocab_size=4160))
    assert tokenizer.vocab_size == 4160


def test_a_template_file_outweighs_the_config(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path)
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(folder).facts.chat_template == "from the file"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]
    folder = copy_of_tiny(tmp_path, tokenizer_config__chat_template=named)
    assert load_tokenizer(folder).facts.chat_template == "y"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json"),
        ("generation_config.json", "{", "generation_config.json"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    folder = copy_of_tiny(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_tokenizer(tmp_path / "missing")


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece is not supported"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A Llama-2 style tokenizer: pieces with space marks, and a token for every byte."""
    folder = tmp_path_factory.mktemp("pieces")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "ab", "▁ab", "é"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")

    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.mark.parametrize("text", ["ab a", " ab", "é€🙂 a", "日本 ab\n"])
def test_sentence_pieces_decode_bytes_and_spaces(sentence_pieces: Tokenizer, text: str) -> None:
    ids = sentence_pieces.encode(text, add_special_tokens=False)
    assert sentence_pieces.decode(ids) == text
