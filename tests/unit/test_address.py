from __future__ import annotations

import pytest

from kvbraid.address import bare_host, is_any_host, join_address, split_address
from kvbraid.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("decode-0.svc:1", "decode-0.svc", 1),
        ("[::1]:65535", "::1", 65535),
        ("[fd00::a:7]:50051", "fd00::a:7", 50051),
        ("[::ffff:10.0.0.7]:50051", "::ffff:10.0.0.7", 50051),
        ("[fe80::1%eth0]:50051", "fe80::1%eth0", 50051),
    ],
)
def test_an_address_is_split_and_joined(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", ":50051", "host:0", "host:65536", "host:-1", "host:+1", "host:٣",
        "::1", "::1:50051", "[::1]", "[::1]50051", "[]:1", "[host]:1", "[1.2.3.4]:1",
        "[::1:50051", "a b:1", "http://host:1", "host:1:2",
    ],
)  # fmt: skip
def test_whatever_is_ambiguous_or_incomplete_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_address(text, "draft_worker")
    assert str(caught.value).startswith(f"draft_worker is {text!r}, accepted: host:port")


def test_brackets_are_neither_doubled_nor_kept_for_sockets() -> None:
    assert join_address("[::1]", 5) == "[::1]:5"
    assert bare_host("[::1]") == bare_host("::1") == "::1"
    assert bare_host("decode") == "decode"


def test_hosts_that_stand_for_every_address() -> None:
    assert all(is_any_host(host) for host in ("0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", ""))
    assert not any(is_any_host(host) for host in ("127.0.0.1", "::1", "[::1]", "decode"))
