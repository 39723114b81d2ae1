"""Certificates: which files a process serves with, whom it lets in, and whom it trusts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvbraid.errors import ConfigError
from kvbraid.settings.fields import setting, settings_of


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """PEM files of TLS; a process reads them again when they change."""

    tls_certificate: str = setting(
        "", "PEM file: the certificate that this process serves with, then its intermediates; "
        "empty: it serves in plaintext.",
    )  # fmt: skip
    tls_private_key: str = setting(
        "", "PEM file: the key of tls_certificate, without a passphrase."
    )
    tls_client_ca: str = setting(
        "", "PEM file: only clients with a certificate of these authorities may connect; empty: "
        "any client.",
    )  # fmt: skip
    tls_server_ca: str = setting(
        "", "PEM file: processes that this one calls must have a certificate of these authorities; "
        "empty: it calls in plaintext.",
    )  # fmt: skip
    tls_client_certificate: str = setting(
        "", "PEM file: the certificate shown to called processes; empty: tls_certificate."
    )
    tls_client_private_key: str = setting("", "PEM file: the key of tls_client_certificate.")
    tls_server_name: str = setting(
        "", "Name that the certificates of called processes must carry; empty: the host by which "
        "each is called.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if misfits := list(self._misfits()):
            raise ConfigError("; ".join(misfits))

    @property
    def serves(self) -> bool:
        """Whether this process's servers speak TLS."""
        return bool(self.tls_certificate)

    @property
    def calls(self) -> bool:
        """Whether this process calls others over TLS."""
        return bool(self.tls_server_ca)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of every file that is named."""
        named = (
            self.tls_certificate,
            self.tls_private_key,
            self.tls_client_ca,
            self.tls_server_ca,
            self.tls_client_certificate,
            self.tls_client_private_key,
        )
        return tuple(filter(None, named))

    @property
    def shown_pair(self) -> tuple[str, str]:
        """Paths of the certificate that called processes are shown, and of its key; maybe empty."""
        if self.tls_client_certificate:
            return self.tls_client_certificate, self.tls_client_private_key
        return self.tls_certificate, self.tls_private_key

    def _misfits(self) -> Iterator[str]:
        for certificate, private_key in (
            ("tls_certificate", "tls_private_key"),
            ("tls_client_certificate", "tls_client_private_key"),
        ):
            pair = getattr(self, certificate), getattr(self, private_key)
            if bool(pair[0]) != bool(pair[1]):
                yield (
                    f"{certificate} is {pair[0]!r} and {private_key} is {pair[1]!r}: accepted are "
                    f"both or none"
                )
        if self.tls_client_ca and not self.tls_certificate:
            yield (
                f"tls_client_ca is {self.tls_client_ca} and tls_certificate is '': clients can be "
                f"asked for a certificate by a process that has one itself"
            )
        for name in ("tls_client_certificate", "tls_server_name"):
            if getattr(self, name) and not self.tls_server_ca:
                yield (
                    f"{name} is {getattr(self, name)} and tls_server_ca is '': calls in plaintext "
                    f"have no use for it"
                )


def tls_from_environment(
    given: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> TlsSettings:
    """How a client that is no service calls: as KVBRAID_TLS_SERVER_CA and the others say.

    given: settings by name that outweigh the environment. environ: None: this process's. Raises
    ConfigError for half a pair and the like.
    """
    environ = os.environ if environ is None else environ
    found = {name: environ.get(f"KVBRAID_{name.upper()}", "") for name in settings_of(TlsSettings)}
    return TlsSettings(**(found | dict(given or {})))
