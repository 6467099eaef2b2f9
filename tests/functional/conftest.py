"""Under `torchrun -m pytest tests/functional`, rank 0 runs the tests, and all ranks what they run on ranks."""

from megatron_frozen.testing.launched import pytest_cmdline_main as pytest_cmdline_main
