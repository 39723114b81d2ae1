"""Renders a conversation with its checkpoint's chat template, which is not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError, TemplateSyntaxError

from kvbraid.errors import CheckpointError, InvalidRequestError
from kvbraid.request import ChatMessage
from kvbraid.template_sandbox import (
    ChatEnvironment,
    StepLimit,
    TemplateLimitError,
    check_size,
)

# What a template can make Python raise: its own refusal, or arithmetic, indexing, calls gone wrong.
_RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        """Compiles `source`; raises CheckpointError with the line when it is malformed."""
        self._named_tokens = dict(named_tokens)
        try:
            self._template = ChatEnvironment().from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
        except (TemplateError, RecursionError, MemoryError) as error:
            raise CheckpointError(f"chat template: {error}") from error

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.

        Raises InvalidRequestError when the template refuses the conversation or exceeds its
        limits.
        """
        variables = {
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self._named_tokens,
        }
        pieces: list[str] = []
        size = 0
        try:
            with StepLimit():
                for piece in self._template.generate(variables):
                    size += len(piece)
                    check_size(size)
                    pieces.append(piece)
        except TemplateLimitError as error:
            raise InvalidRequestError(
                f"messages: the chat template {error}", field="messages"
            ) from error
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"messages: the chat template refused them: {error}", field="messages"
            ) from error
        return "".join(pieces)
