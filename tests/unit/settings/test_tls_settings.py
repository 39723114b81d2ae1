"""Which combinations of certificate files are no combination."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvbraid.errors import ConfigError
from kvbraid.settings import TlsSettings, tls_from_environment

PAIR = {"tls_certificate": "a.crt", "tls_private_key": "a.key"}
CLIENT_PAIR = {"tls_client_certificate": "b.crt", "tls_client_private_key": "b.key"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tls_certificate": "a.crt"}, "tls_certificate is 'a.crt' and tls_private_key is ''"),
        ({"tls_private_key": "a.key"}, "tls_certificate is '' and tls_private_key is 'a.key'"),
        (
            {"tls_client_certificate": "b.crt", "tls_server_ca": "ca"},
            "tls_client_certificate is 'b.crt' and tls_client_private_key is ''",
        ),
        ({"tls_client_ca": "ca"}, "tls_client_ca is ca and tls_certificate is ''"),
        (CLIENT_PAIR, "tls_client_certificate is b.crt and tls_server_ca is ''"),
        ({"tls_server_name": "kv"}, "tls_server_name is kv and tls_server_ca is ''"),
    ],
)
def test_half_a_combination_is_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match="^" + reason) as refused:
        TlsSettings(**given)
    assert ";" not in str(refused.value)


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        TlsSettings(tls_private_key="a.key", tls_client_ca="ca", tls_server_name="kv")
    assert len(str(refused.value).split("; ")) == 3


@pytest.mark.parametrize(
    ("given", "serves", "calls", "shown"),
    [
        ({}, False, False, ("", "")),
        (PAIR, True, False, ("a.crt", "a.key")),
        ({"tls_server_ca": "ca"}, False, True, ("", "")),
        (PAIR | {"tls_server_ca": "ca", "tls_client_ca": "ca"}, True, True, ("a.crt", "a.key")),
        (PAIR | CLIENT_PAIR | {"tls_server_ca": "ca"}, True, True, ("b.crt", "b.key")),
    ],
)
def test_what_a_process_does_with_its_files(
    given: dict[str, Any], serves: bool, calls: bool, shown: tuple[str, str]
) -> None:
    tls = TlsSettings(**given)
    assert (tls.serves, tls.calls, tls.shown_pair) == (serves, calls, shown)


def test_every_file_that_is_named_is_among_the_files() -> None:
    named = {field.name: field.name for field in fields(TlsSettings)}
    assert set(TlsSettings(**named).files) == set(named) - {"tls_server_name"}
    assert TlsSettings(**PAIR).files == ("a.crt", "a.key")


def test_clients_read_the_environment_of_services_under_their_flags() -> None:
    environ = {"KVBRAID_TLS_SERVER_CA": "ca", "KVBRAID_TLS_SERVER_NAME": "kv", "KVBRAID_PORT": "1"}
    expected = TlsSettings(tls_server_ca="ca", tls_server_name="kv")
    assert tls_from_environment(environ=environ) == expected
    given = {"tls_server_ca": "other"}
    assert tls_from_environment(given, environ).tls_server_ca == "other"
    assert tls_from_environment(environ={}) == TlsSettings()
