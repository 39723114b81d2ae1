"""Token ids of a chat prompt, as the coordinator makes them."""

from __future__ import annotations

from pathlib import Path

from kvbraid.chat_template import ChatTemplate
from kvbraid.request import ChatMessage
from kvbraid.tokenizer import load_tokenizer


def chat_prompt_ids(model: Path, text: str) -> list[int]:
    """A conversation of one user's message, up to where the answer begins.

    Raises ValueError for a model without a chat template.
    """
    tokenizer = load_tokenizer(model)
    facts = tokenizer.facts
    if facts.chat_template is None:
        raise ValueError(f"{model} has no chat template")
    rendered = ChatTemplate(facts.chat_template, facts.named_tokens).render(
        [ChatMessage("user", text)]
    )
    return tokenizer.encode(rendered, add_special_tokens=False)
