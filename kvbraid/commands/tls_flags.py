"""The flags of TLS, named as the settings of the services are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvbraid.settings import TlsSettings, tls_from_environment
from kvbraid.settings.fields import settings_of

_SETTINGS = settings_of(TlsSettings)
# What concerns a program that only calls.
_OF_CLIENTS = (
    "tls_server_ca", "tls_client_certificate", "tls_client_private_key", "tls_server_name",
)  # fmt: skip


def add_tls_arguments(parser: argparse.ArgumentParser, names: Sequence[str] = _OF_CLIENTS) -> None:
    """Declare them; one that is left out is taken from the environment, as a service does."""
    for name in names:
        item = _SETTINGS[name]
        parser.add_argument(
            item.flag,
            metavar="NAME" if name == "tls_server_name" else "FILE",
            default=argparse.SUPPRESS,
            help=item.description.sentence,
        )


def add_service_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare those of services."""
    add_tls_arguments(parser, tuple(_SETTINGS))


def tls_of(arguments: argparse.Namespace) -> TlsSettings:
    """How to call. Raises ConfigError for half a pair and the like."""
    return tls_from_environment(_given(arguments))


def service_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The flags as they were given, for a service that is started."""
    return tuple(f"{_SETTINGS[name].flag}={value}" for name, value in _given(arguments).items())


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: getattr(arguments, name) for name in _SETTINGS if hasattr(arguments, name)}
