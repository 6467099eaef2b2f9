"""Layers in compiled blocks: one graph each, the values of eager; case 48."""

from __future__ import annotations

import pytest

from megatron_frozen.testing import run_ranks
from tests.unit.compile_ranks import compile_blocks

KINDS = ["frozen", "lora", "trainable", "fused", "split"]
# Dynamo looks at .grad of a block's input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_on_one_rank(kind: str, backend: str) -> None:
    """Compiled twice at most: the first block's input has no gradient."""
    error, num_graphs, num_compared = compile_blocks(0, 1, kind, backend, {})
    assert num_compared > 2
    assert error < 1e-6
    assert num_graphs <= 2


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "sequence parallel"])
@pytest.mark.parametrize(("kind", "backend"), [*((kind, "aot_eager") for kind in KINDS), ("lora", "inductor")])
def test_blocks_on_two_ranks(kind: str, backend: str, *, sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    for error, num_graphs, num_compared in run_ranks(2, compile_blocks, kind, backend, options):
        assert num_compared > 2
        assert error < 1e-6
        assert num_graphs <= 2
