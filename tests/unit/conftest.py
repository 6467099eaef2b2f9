"""Fixtures of more than one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_frozen.bench import runner


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test on so many of torch's threads."""
    with runner.num_threads(request.param):
        yield request.param
