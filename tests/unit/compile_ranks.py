"""Blocks of layers compiled on each rank of the pool, beside the same blocks in eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_frozen import ColumnParallelLinear, LoraConfig, ModelParallelConfig, RowParallelLinear
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.lora import LoraLinear
from megatron_frozen.testing import relative_error

HIDDEN, WIDE, RANK, NUM_BLOCKS = 8, 12, 4, 3


class Block(nn.Module):
    """A column and a row layer of one kind: "trainable", "fused", "frozen" or "lora"; or "split", where the first part
    of the column layer's weight is frozen."""

    def __init__(self, kind: str, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.kind = kind
        config = ModelParallelConfig(sequence_parallel=sequence_parallel, gradient_accumulation_fusion=kind == "fused")
        column = ColumnParallelLinear(
            HIDDEN, WIDE, config=config, init_method=nn.init.normal_,
            parameters_split={"gate": 4, "up": 8} if kind == "split" else None,
        )  # fmt: skip
        row = RowParallelLinear(
            WIDE, HIDDEN, config=config, init_method=nn.init.normal_, bias=True, input_is_parallel=True,
            skip_bias_add=False,
        )  # fmt: skip
        weights: list[Any] = [getattr(column, name) for name in column.weight_names] + [row.weight]
        for i, weight in enumerate(weights):
            weight.requires_grad = kind in ("trainable", "fused") or (kind == "split" and i > 0)
            if kind == "fused":
                weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        self.up: nn.Module = self._adapted(column) if kind == "lora" else column
        self.down: nn.Module = self._adapted(row) if kind == "lora" else row

    @staticmethod
    def _adapted(base: ColumnParallelLinear | RowParallelLinear) -> LoraLinear:
        layer = LoraLinear(base)
        full_A, full_B = torch.randn(RANK, base.input_size), torch.randn(base.output_size, RANK)
        layer.add_adapter("default", LoraConfig(r=RANK), full_A=full_A, full_B=full_B)
        layer.active_adapter = "default"
        return layer

    def forward(self, input_: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(input_)[0]))[0]

    def take_gradients(self) -> list[Tensor]:
        """Return all gradients, buffers included, and clear them."""
        found = []
        for parameter in self.parameters():
            buffer = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if buffer is None else buffer
            if parameter.requires_grad:
                assert gradient is not None
                found.append(gradient.clone())
                gradient.zero_()
        return found


def _run(function: Any, blocks: list[Block], input_: Tensor) -> list[Tensor]:
    output = input_
    for block in blocks:
        output = function(block, output)
    output.square().sum().backward()
    return [output.detach(), *(gradient for block in blocks for gradient in block.take_gradients())]


def compile_blocks(
    rank: int, world_size: int, kind: str, backend: str, options: dict[str, bool]
) -> tuple[float, int, int]:
    """Return the largest error against eager, the number of graphs, and of gradients compared."""
    if world_size > 1:
        initialize_model_parallel(world_size)
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [Block(kind, sequence_parallel=options.get("sequence_parallel", False)) for _ in range(NUM_BLOCKS)]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda block, input_: block(input_), fullgraph=True, backend=counter)
    error, num_compared = 0.0, 0
    for seed in range(2):
        input_ = torch.randn(4, 2, HIDDEN, generator=torch.Generator().manual_seed(seed))
        actual = _run(compiled, blocks, input_)
        expected = _run(lambda block, input_: block(input_), blocks, input_)
        error = max(error, *(relative_error(ours, eager) for ours, eager in zip(actual, expected, strict=True)))
        num_compared += len(expected)
    torch._dynamo.reset()
    return error, counter.frame_count, num_compared
