"""Permission to push the fused rows of one prompt to a draft service. Knows no wire."""

from __future__ import annotations

from dataclasses import dataclass

from kvbraid.errors import IncompatibleError

TRANSFER_ID_BYTES = 16
# Names of draft rows' types; the draft service has torch's types of the same names.
ROW_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DraftGrant:
    """Where a prefill worker pushes the rows of the sequence `key`, and how.

    address: host:port of the service. incarnation: of the service, its epoch. key: as the decode
    worker names the sequence. row_dtype: one of ROW_DTYPES. Raises IncompatibleError for
    impossible values: a grant comes from a peer.
    """

    address: str
    transfer_id: bytes
    incarnation: int
    key: str
    row_dtype: str
    max_rows_per_message: int

    def __post_init__(self) -> None:
        if len(self.transfer_id) != TRANSFER_ID_BYTES:
            raise IncompatibleError(
                f"transfer id must have {TRANSFER_ID_BYTES} bytes, got {len(self.transfer_id)}"
            )
        if self.row_dtype not in ROW_DTYPES:
            raise IncompatibleError(f"row_dtype {self.row_dtype!r}, accepted: {ROW_DTYPES}")
        if self.max_rows_per_message < 1:
            raise IncompatibleError(
                f"max_rows_per_message {self.max_rows_per_message} must be >= 1"
            )
