"""Ask with the openai package: python examples/openai_client.py HOST:PORT "a question".

Over TLS with https://HOST:PORT; SSL_CERT_FILE names an authority that the system does not know.
"""

from __future__ import annotations

import sys

import openai


def ask(address: str, question: str) -> None:
    """Streams the answer to stdout, then prints the token counts."""
    url = address if "://" in address else f"http://{address}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    model = next(iter(client.models.list())).id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} prompt + {chunk.usage.completion_tokens} new]")


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2])
