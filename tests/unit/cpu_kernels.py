"""What the tests of the compiled kernels share."""

from __future__ import annotations

import pytest

from megatron_frozen import kernels

needs_kernels = pytest.mark.skipif(kernels.absent() is not None, reason=f"the kernels: {kernels.absent()}")
