"""The base of a kernel's log-sum-exp, declared where its result enters the library."""

from __future__ import annotations

import enum
import math

from torch import Tensor


class LseBase(enum.Enum):
    """Base of the logarithm; the value is its natural logarithm.

    Kernels that work with exp2 report base 2. Merged as natural, such an lse gives almost equal
    stripes nearly the right weights and skewed ones wrong weights, so it is never guessed.
    """

    E = 1.0
    TWO = math.log(2.0)

    def to_natural(self, lse: Tensor) -> Tensor:
        """float32 `lse` of this base as natural-log lse; -inf stays -inf."""
        return lse if self is LseBase.E else lse * self.value
