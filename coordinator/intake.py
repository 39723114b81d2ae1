"""From what a client wrote to a validated, tokenised request."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from coordinator.registry import Registry
from kvbraid.chat_template import ChatTemplate
from kvbraid.errors import InvalidRequestError, NotFoundError
from kvbraid.request import ChatMessage, GenerateRequest, SamplingParams
from kvbraid.tokenizer import Tokenizer
from kvbraid.validation import (
    Limits,
    check_prompt_length,
    validate_names,
    validate_prompt,
    validate_sampling,
)

CHAT_ROLES = ("system", "user", "assistant")

Prompt = str | Sequence[int] | tuple[ChatMessage, ...]
"""Plain text, token ids, or a conversation. Ids may be those of a message: only a prompt that can
fit is copied."""

# Ids copied in one go.
_COPIED_IDS = 65536


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """A request as it came in. Empty request_id: one is made. Empty model: the one served."""

    prompt: Prompt
    sampling: SamplingParams
    request_id: str = ""
    model: str = ""
    cache_salt: str = ""


class Intake:
    """Turns drafts into requests. All refusals happen here, before any worker hears of them."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        registry: Registry,
        served_model_name: str,
    ) -> None:
        """template: None when the checkpoint has none. served_model_name: empty: the workers'."""
        self._tokenizer = tokenizer
        self._template = template
        self._registry = registry
        self._served_model_name = served_model_name
        self._running: set[str] = set()

    @property
    def model_name(self) -> str:
        """What clients call the model; empty before a worker has said."""
        model = self._registry.model
        return self._served_model_name or (model.model if model is not None else "")

    async def admit(self, draft: RequestDraft) -> GenerateRequest:
        """Validates and tokenises; draws the sampling seed when the client gave none.

        Raises InvalidRequestError, NotFoundError for another model, UnavailableError while no
        decode worker is up.
        """
        limits = await self._registry.wait_limits()
        self.check_model(draft.model)
        validate_names(draft.request_id, draft.cache_salt)
        sampling = self._completed(draft.sampling)
        validate_sampling(sampling, limits.vocab_size)
        # Long prompts take a while; what is done with them lets other threads run meanwhile.
        prompt_ids, sampling = await asyncio.to_thread(
            self._understand, draft.prompt, sampling, limits
        )
        return GenerateRequest(
            request_id=draft.request_id or uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            sampling=sampling,
            cache_salt=draft.cache_salt,
        )

    def check_model(self, model: str) -> None:
        """Raises NotFoundError unless `model` is empty or the served one."""
        if model and model != self.model_name:
            raise NotFoundError(f"model is {model!r}; served: {self.model_name!r}")

    @contextmanager
    def running(self, request_id: str) -> Iterator[None]:
        """Holds the id while the request runs: workers know requests by it.

        Raises InvalidRequestError when another request holds it.
        """
        if request_id in self._running:
            raise InvalidRequestError(
                f"request_id is {request_id!r}; accepted: one that no running request has",
                field="request_id",
            )
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.discard(request_id)

    def _completed(self, sampling: SamplingParams) -> SamplingParams:
        own = () if sampling.ignore_eos else self._tokenizer.facts.eos_token_ids
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *own)))
        return replace(sampling, seed=seed, stop_token_ids=stops)

    def _understand(
        self, prompt: Prompt, sampling: SamplingParams, limits: Limits
    ) -> tuple[tuple[int, ...], SamplingParams]:
        prompt_ids = self._tokenise(prompt, limits.max_model_len)
        return prompt_ids, validate_prompt(prompt_ids, sampling, limits)

    def _tokenise(self, prompt: Prompt, max_model_len: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._check_length(prompt, max_model_len)
            return tuple(self._tokenizer.encode(prompt, add_special_tokens=True))
        if not prompt:
            raise InvalidRequestError("prompt is empty; accepted: at least 1 token or message")
        if isinstance(prompt[0], int):
            check_prompt_length(len(prompt), max_model_len)
            return _copied(cast("Sequence[int]", prompt))
        text = self._render(cast("Sequence[ChatMessage]", prompt))
        self._check_length(text, max_model_len)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            raise InvalidRequestError(
                "messages: the model has no chat template; accepted: prompt", field="messages"
            )
        for index, message in enumerate(messages):
            if message.role not in CHAT_ROLES:
                raise InvalidRequestError(
                    f"messages[{index}].role is {message.role!r}; accepted: "
                    f"{', '.join(CHAT_ROLES)}",
                    field="messages",
                )
        return self._template.render(messages)

    def _check_length(self, text: str, max_model_len: int) -> None:
        """Spares the tokenizer a text that cannot fit whatever its tokens are."""
        most = max_model_len * self._tokenizer.max_token_chars
        if len(text) > most:
            raise InvalidRequestError(
                f"prompt has {len(text)} characters; accepted: what fits into "
                f"{max_model_len - 1} tokens, never more than {most}",
                field="prompt",
            )


def _copied(token_ids: Sequence[int]) -> tuple[int, ...]:
    """In parts, between which other threads run: copied at once, a million ids would stop the event
    loop for as long as that takes."""
    starts = range(0, len(token_ids), _COPIED_IDS)
    return tuple(chain.from_iterable(token_ids[i : i + _COPIED_IDS] for i in starts))
