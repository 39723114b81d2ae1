"""GGUF metadata, against the same tokenizer in a Hugging Face folder."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from kvbraid.errors import CheckpointError
from kvbraid.gguf_tokenizer import read_gguf_tokenizer
from kvbraid.settings.loader import models_directory
from kvbraid.tokenizer import Tokenizer, load_tokenizer

ASSETS = Path(__file__).parents[2] / "assets"
TINY = ASSETS / "tiny-mla"
SMOLLM2 = models_directory() / "smollm2-135m-instruct"
CONTROL, NORMAL = 3, 1


def write_gguf(
    path: Path, *, pre: str = "smollm", model: str = "gpt2", merges: bool = True
) -> Path:
    """The tiny-mla tokenizer as GGUF metadata. Its pre-tokenizer is the one called smollm."""
    source = json.loads((TINY / "tokenizer.json").read_text())
    vocab: dict[str, int] = source["model"]["vocab"]
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i < 5 else NORMAL for i in range(len(tokens))])
    pairs = [m if isinstance(m, str) else " ".join(m) for m in source["model"]["merges"]]
    if merges:
        writer.add_token_merges(pairs)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(4)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf"))


HF = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_facts_of_a_gguf_file(from_gguf: Tokenizer) -> None:
    facts = from_gguf.facts
    assert (facts.vocab_size, facts.bos_token_id, facts.add_bos) == (4096, 0, True)
    assert facts.eos_token_ids == (2, 4)
    assert facts.chat_template == "{{ messages }}"
    assert facts.named_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert from_gguf.special_ids == {0, 1, 2, 3, 4}


@given(text=st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_texts_are_encoded_as_from_the_folder(from_gguf: Tokenizer, text: str) -> None:
    assert from_gguf.encode(text, add_special_tokens=False) == HF.encode(text).ids


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nHi<|im_end|>\n",
        "x = 1234 + 5;\n\n  return",
        "naïve café 日本語 🙂🙂",
        "   ",
    ],
)
def test_special_tokens_digits_and_spaces(from_gguf: Tokenizer, text: str) -> None:
    ids = from_gguf.encode(text, add_special_tokens=False)
    assert ids == HF.encode(text).ids
    assert from_gguf.decode(ids, skip_special_tokens=False) == text
    assert from_gguf.encode(text, add_special_tokens=True) == [0, *ids]


def test_a_folder_with_one_gguf_file_is_taken(tmp_path: Path) -> None:
    write_gguf(tmp_path / "some-name.gguf")
    assert load_tokenizer(tmp_path).vocab_size == 4096


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.pre is 'martian'; supported: .*qwen2"
    ):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", pre="martian"))


def test_an_unknown_tokenizer_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is 'bert'; supported: 'gpt2'"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", model="bert"))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges is missing"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", merges=False))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all, but long enough" * 9])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        load_tokenizer(path)


TEXTS = [
    "I'll pay 12345 dollars, O'KEEFE!\r\n\r\n  ok",
    "naïve 日本語テキスト 漢字123 ½²",
    "a\n\n\nb   c\t d",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("qwen2", PRETOKENIZE_REGEX),
        ("llama-bpe", signature(TikTokenConverter).parameters["pattern"].default),
    ],
)
def test_words_are_split_as_transformers_splits_them(
    tmp_path: Path, pre: str, pattern: str, text: str
) -> None:
    loaded = read_gguf_tokenizer(write_gguf(tmp_path / "model.gguf", pre=pre)).tokenizer
    oracle = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert loaded.pre_tokenizer.pre_tokenize_str(text) == oracle.pre_tokenize_str(text)


def test_deepseek_v3_splits_digits_by_three_and_scripts_apart(tmp_path: Path) -> None:
    loaded = read_gguf_tokenizer(write_gguf(tmp_path / "model.gguf", pre="deepseek-v3")).tokenizer
    text = "Go12345 漢字かなx!if (a)"
    spans = [span for _, span in loaded.pre_tokenizer.pre_tokenize_str(text)]
    words = [text[start:end] for start, end in spans]
    assert words == ["Go", "123", "45", " ", "漢字かな", "x", "!if", " (", "a", ")"]


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is missing: kvbraid model pull")
def test_smollm2_tokenises_its_reference_prompts() -> None:
    tokenizer = load_tokenizer(SMOLLM2)
    assert (tokenizer.vocab_size, tokenizer.facts.eos_token_ids) == (49152, (2,))
    lines = (ASSETS / "reference" / "smollm2-135m-greedy.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert tokenizer.decode(row["output_ids"]) == row["text"]
        text = tokenizer.decode(row["prompt_ids"], skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == row["prompt_ids"]
