"""Helpers for tests: ranks as processes, and errors against an fp64 reference."""

from __future__ import annotations

from megatron_frozen.testing.pool import DEVICE_OF_BACKEND as DEVICE_OF_BACKEND
from megatron_frozen.testing.pool import RankError as RankError
from megatron_frozen.testing.pool import run_ranks as run_ranks
