"""Builds a byte-level BPE tokenizer from the metadata of a GGUF file. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvbraid.errors import CheckpointError

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2_PATTERN = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Hiragana, katakana and the CJK unified ideographs of the published tokenizer.
_DEEPSEEK3_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "qwen2": (_QWEN2_PATTERN,),
    "llama-bpe": (_LLAMA3_PATTERN,),
    "llama3": (_LLAMA3_PATTERN,),
    "llama-v3": (_LLAMA3_PATTERN,),
    "deepseek-v3": (r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3_WORDS),
}
_PLAIN_GPT2 = frozenset({"default", "gpt-2", "gpt2"})
_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


class GgufTokenizer(NamedTuple):
    """What a GGUF file says about its tokenizer; ids are None where the file is silent."""

    tokenizer: Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Reads the tokenizer of the GGUF file `path`.

    Raises CheckpointError when the file is no GGUF file, or names a tokenizer model or a
    pre-tokenizer that is not known here.
    """
    metadata = _read_metadata(path)
    kind = _require(metadata, "tokenizer.ggml.model", path)
    if kind != "gpt2":
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2'")
    tokens: list[str] = _require(metadata, "tokenizer.ggml.tokens", path)
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(_build_bpe(tokens, metadata, str(pre), path))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _build_pre_tokenizer(str(pre), path)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    ends = ("eos", "eot", "eom")
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ends]
    return GgufTokenizer(
        tokenizer=tokenizer,
        vocab_size=len(tokens),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(sorted({int(token_id) for token_id in found if token_id is not None})),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }


def _require(metadata: Mapping[str, Any], key: str, path: Path) -> Any:
    if key not in metadata:
        raise CheckpointError(f"{path}: metadata key {key} is missing")
    return metadata[key]


def _build_bpe(tokens: list[str], metadata: Mapping[str, Any], pre: str, path: Path) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_split_merge(line) for line in _require(metadata, "tokenizer.ggml.merges", path)]
    known = [(left, right) for left, right in merges if left in vocab and right in vocab]
    if len(known) < len(merges):
        raise CheckpointError(
            f"{path}: {len(merges) - len(known)} merges name tokens that are not in the vocabulary"
        )
    return models.BPE(vocab=vocab, merges=known, ignore_merges=pre.startswith("llama"))


def _split_merge(line: str) -> tuple[str, str]:
    # The left side may itself start with a space-like character, never contain one inside.
    left, _, right = line.partition(" ")
    return left, right


def _build_pre_tokenizer(pre: str, path: Path) -> pre_tokenizers.PreTokenizer:
    if pre in _PLAIN_GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if pre not in _PATTERNS:
        known = sorted({*_PLAIN_GPT2, *_DIGITS_THEN_GPT2, *_PATTERNS})
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(known)}"
        )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    user = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user])
