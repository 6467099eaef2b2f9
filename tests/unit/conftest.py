"""Fixtures of more than one file, and the same examples of hypothesis everywhere, however long they take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from megatron_frozen.bench import runner

# As hypothesis does by itself where it sees CI. A deadline of its own, 200 ms, is missed by whoever shares the machine.
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test on so many of torch's threads."""
    with runner.num_threads(request.param):
        yield request.param
