"""Text to token ids and back, from a Hugging Face folder or a GGUF file.

Decoding is defined on bytes: every token stands for fixed bytes, and a text is those bytes as
UTF-8 with malformed sequences replaced. So it can be done token by token (see `detokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from kvbraid.errors import CheckpointError
from kvbraid.gguf_tokenizer import read_gguf_tokenizer

_SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a checkpoint says about its tokenizer besides the vocabulary itself."""

    vocab_size: int
    """Ids that the model's embedding has, [0, vocab_size); at least the tokenizer's own."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a generation."""
    bos_token_id: int | None
    """Token that may start a text."""
    add_bos: bool | None
    """Whether plain text gets the bos token; None leaves it to the post-processor."""
    chat_template: str | None
    """Jinja source."""
    named_tokens: Mapping[str, str]
    """Texts of bos_token, eos_token, ... as chat templates use them."""


class Tokenizer:
    """A loaded tokenizer. Thread-safe: `encode` may run in any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        self._backend = backend
        self.facts = facts
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_bytes = _TokenBytes(backend, {i: t.content for i, t in added.items()})

    @property
    def vocab_size(self) -> int:
        """Valid token ids are [0, vocab_size)."""
        return self.facts.vocab_size

    @property
    def max_token_chars(self) -> int:
        """No token stands for more characters than this."""
        return self._token_bytes.longest

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; the texts of special tokens become those tokens.

        `add_special_tokens` adds what the model expects around plain text (its bos token, if any);
        a rendered chat template already has it.
        """
        post_process = add_special_tokens and self.facts.add_bos is None
        ids: list[int] = self._backend.encode(text, add_special_tokens=post_process).ids
        bos = self.facts.bos_token_id
        if add_special_tokens and self.facts.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes (possibly part of a character) of one token; empty for an unused id."""
        return self._token_bytes[token_id]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text that the tokens add to what stands before them.

        A leading space is kept: this is the middle of a text, not its start.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        parts = [self._token_bytes[i] for i in token_ids if i not in skipped]
        return b"".join(parts).decode("utf-8", errors="replace")


class _TokenBytes:
    """Bytes of every token, by the rules of the tokenizer's own decoder."""

    def __init__(self, backend: tokenizers.Tokenizer, added: Mapping[int, str]) -> None:
        spell = _byte_level_bytes if _is_byte_level(backend) else _piece_bytes
        vocab = backend.get_vocab(with_added_tokens=False)
        table = [b""] * (1 + max([*vocab.values(), *added]))
        for token, token_id in vocab.items():
            table[token_id] = spell(token)
        for token_id, content in added.items():
            table[token_id] = content.encode()
        self._table = table
        self.longest = max(map(len, table))

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._table):
            return b""
        return self._table[token_id]


def _byte_alphabet() -> dict[str, int]:
    """The GPT-2 alphabet: printable bytes stand for themselves, the rest start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokens are spelled in the GPT-2 byte alphabet (else: SentencePiece pieces)."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": None}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"Metaspace", "ByteFallback"}:
        return False
    names = ", ".join(sorted(str(kind) for kind in kinds))
    raise CheckpointError(
        f"tokenizer decoder {names} is not supported; supported: ByteLevel, Metaspace, ByteFallback"
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder, a GGUF file or a folder with one GGUF file.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    path = Path(path)
    if path.is_file():
        return _load_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    if (path / "tokenizer.json").is_file():
        return _load_folder(path)
    files = sorted(path.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{path}: neither tokenizer.json nor a .gguf file in it")
    return _load_gguf(files[0])


def _load_gguf(path: Path) -> Tokenizer:
    loaded = read_gguf_tokenizer(path)
    names = {"bos_token": loaded.bos_token_id, "eos_token": next(iter(loaded.eos_token_ids), None)}
    texts = {name: loaded.tokenizer.id_to_token(i) for name, i in names.items() if i is not None}
    facts = TokenizerFacts(
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        bos_token_id=loaded.bos_token_id,
        add_bos=loaded.add_bos,
        chat_template=loaded.chat_template,
        named_tokens={name: text for name, text in texts.items() if text is not None},
    )
    return Tokenizer(loaded.tokenizer, facts)


def _load_folder(path: Path) -> Tokenizer:
    source = path / "tokenizer.json"
    with _NamingFile(source):
        backend = tokenizers.Tokenizer.from_str(source.read_text(encoding="utf-8"))
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(path / "tokenizer_config.json")
    model = _read_json(path / "config.json")
    named = _named_tokens(config)
    bos = named.get("bos_token")
    facts = TokenizerFacts(
        vocab_size=max(int(model.get("vocab_size", 0)), backend.get_vocab_size()),
        eos_token_ids=_eos_ids(backend, named, _read_json(path / "generation_config.json"), model),
        bos_token_id=backend.token_to_id(bos) if bos else None,
        add_bos=config.get("add_bos_token"),
        chat_template=_chat_template(path, config),
        named_tokens=named,
    )
    return Tokenizer(backend, facts)


class _NamingFile:
    """Turns what the tokenizers package raises (Exception itself) into a CheckpointError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if type(error) is Exception or isinstance(error, (OSError, UnicodeDecodeError)):
            raise CheckpointError(f"{self._path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: config.get(name) for name in names}
    texts = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in found.items()
        if token
    }
    return {name: str(text) for name, text in texts.items()}


def _eos_ids(
    backend: tokenizers.Tokenizer,
    named: Mapping[str, str],
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
) -> tuple[int, ...]:
    """The union of what the generation config (else the model config) and the tokenizer name."""
    declared = generation.get("eos_token_id", model.get("eos_token_id"))
    ids: Sequence[int] = declared if isinstance(declared, list) else [declared]
    named_eos = named.get("eos_token")
    own = backend.token_to_id(named_eos) if named_eos else None
    return tuple(sorted({int(i) for i in [*ids, own] if i is not None}))


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template
