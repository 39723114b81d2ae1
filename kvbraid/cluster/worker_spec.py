"""One worker in a few letters: "tp=2,dcp=2,page_size=4"."""

from __future__ import annotations

from dataclasses import dataclass

from kvbraid.errors import ConfigError

_SHORT = {"tp": "tp_size", "dcp": "dcp_size"}


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker's role and its settings by name, as text."""

    role: str
    options: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, role: str, text: str) -> WorkerSpec:
        """The worker that `text` describes: KEY=VALUE pairs with commas between.

        Keys are settings of the service; tp and dcp are short for tp_size and dcp_size. The
        service itself refuses unknown ones. Raises ConfigError for anything but pairs.
        """
        options = []
        for pair in text.split(","):
            key, separator, value = pair.strip().partition("=")
            if not separator or not key or not value:
                raise ConfigError(f"--{role} has {pair!r}, accepted: KEY=VALUE as in tp=2,dcp=2")
            options.append((_SHORT.get(key, key), value))
        return cls(role, tuple(options))

    def option(self, name: str) -> str:
        """The value of a setting. Raises ConfigError when it is not given."""
        for key, value in self.options:
            if key == name:
                return value
        raise ConfigError(f"--{self.role} has no {name}, accepted: {name}=VALUE among its settings")

    def flags(self) -> list[str]:
        """The command line flags of its service."""
        return [f"--{key.replace('_', '-')}={value}" for key, value in self.options]
