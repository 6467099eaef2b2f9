"""An inference model with split parameters as ONNX, run by onnxruntime beside torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from megatron_frozen import ColumnParallelLinear, LayerNormLinear, Linear, ModelParallelConfig
from megatron_frozen.layers import RowParallelLinear
from tests.unit.split_ranks import make_disjoint

# torch's exporter asks torch's own pytrees in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")


class Model(nn.Module):
    """A split layer of each kind, with and without bias."""

    def __init__(self, normalization: Any) -> None:
        super().__init__()
        config = ModelParallelConfig()
        self.qkv = LayerNormLinear(8, 16, normalization=normalization, parameters_split={"q": 8, "k": 4, "v": 4})
        self.up = Linear(16, 8, parameters_split=["x", "y"], bias=False)
        self.column = ColumnParallelLinear(
            8, 6, config=config, init_method=nn.init.normal_, parameters_split=["g", "u"]
        )
        self.row = RowParallelLinear(
            6, 4, config=config, init_method=nn.init.normal_, bias=True, input_is_parallel=True, skip_bias_add=False
        )

    def forward(self, input_: Tensor) -> Tensor:
        hidden, _ = self.column(self.up(torch.relu(self.qkv(input_))))
        return self.row(hidden)[0]


def _exported(model: nn.Module, path: Path, *, optimize: bool) -> None:
    torch.onnx.export(
        model,
        (torch.randn(5, 2, 8),),
        path,
        dynamo=True,
        optimize=optimize,
        dynamic_shapes={"input_": {0: torch.export.Dim("tokens")}},
        verbose=False,
    )


@pytest.mark.parametrize("memory", ["adjacent", "disjoint"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_onnxruntime_agrees_with_torch(normalization: str, memory: str, tmp_path: Path) -> None:
    """At other numbers of tokens than the exported one too."""
    torch.manual_seed(0)
    model = Model(normalization).eval()
    if memory == "disjoint":
        for layer in (model.qkv, model.up, model.column):
            make_disjoint(layer)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    _exported(model, tmp_path / "model.onnx", optimize=True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for num_tokens in (5, 9, 1):
        input_ = torch.randn(num_tokens, 2, 8)
        (actual,) = session.run(None, {"input_": input_.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(actual), model(input_), rtol=1e-4, atol=1e-4)


def test_parts_are_concatenated_in_the_graph(tmp_path: Path) -> None:
    """Before the exporter folds them: parts keep their names, and no operator of ours is in the graph."""
    model = Model("RMSNorm").eval()
    _exported(model, tmp_path / "model.onnx", optimize=False)
    graph = onnx.load(tmp_path / "model.onnx").graph
    names = {initializer.name for initializer in graph.initializer}
    joined = [list(node.input) for node in graph.node if node.op_type == "Concat" and set(node.input) <= names]
    layers = {"qkv": "qkv", "up": "xy", "column": "gu"}
    weights = [[f"{layer}.{part}_weight" for part in parts] for layer, parts in layers.items()]
    biases = [[f"{layer}.{part}_bias" for part in parts] for layer, parts in layers.items() if layer != "up"]
    assert sorted(joined) == sorted(weights + biases)
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
