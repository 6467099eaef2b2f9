"""Helpers for tests: ranks as processes, and errors against an fp64 reference."""

from __future__ import annotations

from megatron_frozen.testing.body import RankError as RankError
from megatron_frozen.testing.body import rank_device as rank_device
from megatron_frozen.testing.pool import DEVICE_OF_BACKEND as DEVICE_OF_BACKEND
from megatron_frozen.testing.pool import run_ranks as run_ranks
from megatron_frozen.testing.reference import assert_close_to as assert_close_to
from megatron_frozen.testing.reference import assert_no_worse_than as assert_no_worse_than
from megatron_frozen.testing.reference import relative_error as relative_error
