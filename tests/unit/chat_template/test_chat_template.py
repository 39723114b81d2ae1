"""Chat templates: as transformers renders them, and harmless whatever they try."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvbraid.chat_template import ChatTemplate
from kvbraid.errors import CheckpointError, InvalidRequestError
from kvbraid.request import ChatMessage
from kvbraid.template_sandbox import MAX_RENDERED_CHARS, MAX_STEPS

TINY = Path(__file__).parents[2] / "assets" / "tiny-mla"
MESSAGES = [
    ChatMessage("system", "  Be brief.\n"),
    ChatMessage("user", "Hi {{ 7 * 7 }} <|im_end|> {% if %}"),
    ChatMessage("assistant", "<think>hm</think>Hello"),
    ChatMessage("user", "naïve 🙂"),
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}
{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n\\n' }}{% endif %}
"""
QWEN3 = """{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- if loop.last %}{%- break %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages if message['role'] != 'system' %}
{% if (message['role'] == 'user') %}{{ '[INST] ' ~ message['content'] ~ ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] ~ eos_token}}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}{{ {'a': [1, 2.5, none], 'é': 'x"y'} | tojson }}"""
TINY_TEMPLATE = json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"]


@pytest.mark.parametrize(
    "source", [TINY_TEMPLATE, LLAMA3, QWEN3, MISTRAL], ids=["tiny", "llama3", "qwen3", "mistral"]
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_are_rendered_as_transformers_renders_them(
    source: str, add_generation_prompt: bool
) -> None:
    conversation = [{"role": m.role, "content": m.content} for m in MESSAGES]
    (expected,), _ = render_jinja_template(
        [conversation],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        **NAMED,
    )
    template = ChatTemplate(source, NAMED)
    assert template.render(MESSAGES, add_generation_prompt=add_generation_prompt) == expected


def test_a_templates_own_refusal_is_the_clients_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="refused them: roles must alternate") as refusal:
        template.render(MESSAGES)
    assert refusal.value.field == "messages"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for a in b %}", "{{ 'a' | attr('b') }}"]
)
def test_a_malformed_template_names_its_line(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template, line 2"):
        ChatTemplate("\n" + source, {})


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'].__base__.__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].items.__self__.__class__.x }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ (namespace).__init__.__globals__ }}",
    "{{ loop.__class__.x }}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f._environment.x }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{% include 'secrets' %}",
    "{% import 'os' as os %}",
    "{% extends 'base' %}",
    "{{ 5 .to_bytes(10000000000) }}",
    "{{ messages }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_outside_the_conversation_is_reached(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(MESSAGES)
    except (InvalidRequestError, CheckpointError):
        return
    assert text == ""


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 99 }}{% endfor %}{% endfor %}",
    "{% for i in range(10000000000) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x' | indent(10000000000, true) | length * 10 ** 10 * 'x' }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ range(100000) | list | join('a' * 1000) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | string }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_no_template_runs_for_long_or_fills_the_memory(source: str) -> None:
    began = time.process_time()
    with pytest.raises((InvalidRequestError, CheckpointError)):
        ChatTemplate(source, {}).render(MESSAGES)
    assert time.process_time() - began < 6


def test_the_same_template_always_stops_at_the_same_step() -> None:
    with pytest.raises(InvalidRequestError, match=f"took more than {MAX_STEPS} steps"):
        ChatTemplate(BOMBS[0], {}).render(MESSAGES)


def test_a_prompt_of_exactly_the_limit_is_rendered() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    text = "x" * MAX_RENDERED_CHARS
    is_whole = template.render([ChatMessage("user", text)]) == text
    assert is_whole
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_RENDERED_CHARS} characters"):
        template.render([ChatMessage("user", text + "x")])


def test_a_refused_rendering_leaves_the_next_one_alone() -> None:
    template = ChatTemplate("{% if messages|length > 1 %}{{ 1 / 0 }}{% endif %}ok", {})
    with pytest.raises(InvalidRequestError, match="division by zero"):
        template.render(MESSAGES)
    assert template.render(MESSAGES[:1]) == "ok"
