"""Typed, complete reading of a raw key-value configuration: what is not understood is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvbraid.errors import CheckpointError


class RawConfig:
    """A checkpoint's keys and values. Every key must be read, be inert, or hold None or False."""

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self._values = values
        self._read: set[str] = set()
        self.origin = origin

    def error(self, key: str, value: object, accepted: str) -> CheckpointError:
        """The refusal of `key`: names the file, the key, its value and what is accepted."""
        return CheckpointError(f"{self.origin}: {key} = {value!r} is refused; accepted: {accepted}")

    def has(self, key: str) -> bool:
        """Whether `key` is present and not null."""
        return self._values.get(key) is not None

    def value(self, key: str) -> object:
        """The raw value, None when absent; counts as understood."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer >= minimum. Raises CheckpointError when malformed, or absent and required."""
        value = self.value(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, value, f"an integer >= {minimum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """An integer >= minimum, or None when absent or null."""
        return self.integer(key, minimum=minimum) if self.value(key) is not None else None

    def number(self, key: str, default: float | None = None) -> float:
        """A number >= 0."""
        value = self.value(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise self.error(key, value, "a number >= 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def choice(self, key: str, accepted: Collection[str], default: str) -> str:
        """One of `accepted`."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in accepted:
            raise self.error(key, value, ", ".join(sorted(accepted)))
        return value

    def fixed(self, key: str, accepted: object) -> None:
        """Refuse any value but `accepted` or null: another one would change the numbers."""
        value = self.value(key)
        if value is not None and value != accepted:
            raise self.error(key, value, repr(accepted))

    def finish(self, inert: Collection[str]) -> None:
        """Refuse the first key that nothing has read, is not inert and is not None or False."""
        for key, value in self._values.items():
            if key in self._read or key in inert or value is None or value is False:
                continue
            raise CheckpointError(
                f"{self.origin}: unknown key {key} = {value!r} could change the model's numbers; "
                "it is refused unless null or false"
            )
