"""Column layers of one input under torch.compile: one graph, the values of eager, whatever becomes of their storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_frozen.layers.joint_columns import multiply_together
from megatron_frozen.lora import LoraLinear
from megatron_frozen.storage import adjacent_view, repack_
from megatron_frozen.testing import assert_close_to
from tests.unit.joint_toys import IN, SIZES, adapt, columns, step, together
from tests.unit.lora_toys import seeded

ADAPTED = {"none": (), "q and v": (0, 2), "all": (0, 1, 2)}


def _weights(layers: list[nn.Module]) -> list[Tensor]:
    bases = [layer.base_layer if isinstance(layer, LoraLinear) else layer for layer in layers]
    return [base.get_parameter("weight") for base in bases]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("is_adjacent", [True, False], ids=["adjacent", "disjoint"])
@pytest.mark.parametrize("adapted", ADAPTED)
def test_one_graph_gives_eager_values_and_outlives_a_move_of_the_weights(
    adapted: str, backend: str, *, is_adjacent: bool
) -> None:
    torch._dynamo.reset()
    layers = adapt(columns(bias=True), ADAPTED[adapted])
    assert not is_adjacent or repack_(_weights(layers))
    input_, grad = seeded(6, 3, IN, seed=4), seeded(6, 3, sum(SIZES), seed=5)
    expected = step(together, layers, input_, grad)
    counter = CompileCounterWithBackend(backend)
    compiled: Any = torch.compile(multiply_together, fullgraph=True, backend=counter)
    assert_close_to(step(compiled, layers, input_, grad), expected, tolerance=1e-6)
    if is_adjacent:
        for weight in _weights(layers):
            weight.data = weight.data.clone()
    else:
        assert repack_(_weights(layers))
    assert (adjacent_view(_weights(layers)) is None) == is_adjacent
    assert_close_to(step(compiled, layers, input_, grad), expected, tolerance=1e-6)
    assert counter.frame_count == 1


def test_hooks_are_judged_when_compiling() -> None:
    """torch.compile itself takes no notice of hooks that are put on later (skip_nnmodule_hook_guards)."""
    torch._dynamo.reset()
    layers, input_ = adapt(columns(), (0, 2)), seeded(6, 3, IN, seed=4)
    layers[0].register_forward_hook(lambda *_: None)
    assert torch.compile(multiply_together, fullgraph=True, backend="eager")(layers, input_) is None
