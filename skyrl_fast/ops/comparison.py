"""What compares a GPU's kernels with the reference: `first_use`, which calls the ops.

The choice of a backend asks for it here, so that it imports no op. torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Comparison:
    """A comparison that is set when `skyrl_fast.ops` is imported."""

    compare: Callable[
        [str, Any, str], str
    ]  # of an op, a device and a backend; "": as the reference


comparison = Comparison()
