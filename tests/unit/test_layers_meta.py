"""Layers on the meta device: shapes, dtypes and gradients without numbers, as torch's own layers give them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_frozen import (
    CausalLM,
    ColumnParallelLinear,
    DecoderConfig,
    LayerNormLinear,
    LoraConfig,
    ModelParallelConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_lora,
    vocab_parallel_cross_entropy,
)
from megatron_frozen.functional import frozen_head_cross_entropy, linear_with_split_parameters
from megatron_frozen.layers.norm import RMSNorm

TOKENS, IN, OUT = (5, 2), 6, 8
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def _facts(output: Tensor, **leaves: Tensor | None) -> dict[str, Any]:
    """Run the backward, and return shape, dtype and device of the output and of each leaf's gradient."""
    output.sum().backward()
    tensors = {"y": output} | {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}
    return {name: t if t is None else (t.shape, t.dtype, t.device) for name, t in tensors.items()}


def _input() -> Tensor:
    return torch.empty(*TOKENS, IN, requires_grad=True)


@pytest.mark.parametrize("autocast", [None, "cpu"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_linears_give_what_torchs_linear_gives(kind: Any, *, bias: bool, trains: bool, autocast: str | None) -> None:
    options: dict[str, Any] = (
        {} if kind is ColumnParallelLinear else {"input_is_parallel": True, "skip_bias_add": False}
    )
    layer = kind(IN, OUT, config=ModelParallelConfig(), init_method=nn.init.zeros_, bias=bias, **options)
    plain = nn.Linear(IN, OUT, bias=bias)
    with torch.autocast(autocast, torch.bfloat16) if autocast else contextlib.nullcontext():
        found, expected = (
            _facts(call(module.requires_grad_(trains), x), dx=x, dw=module.weight, db=module.bias)
            for module, call, x in ((layer, lambda m, x: m(x)[0], _input()), (plain, lambda m, x: m(x), _input()))
        )
    assert found == expected


@pytest.mark.parametrize("options", [{"dgrad_in_fp32": True}, {"gradient_accumulation_fusion": True}], ids=str)
def test_wider_products(options: dict[str, Any]) -> None:
    config = ModelParallelConfig(params_dtype=torch.bfloat16, **options)
    layer = ColumnParallelLinear(IN, OUT, config=config, init_method=nn.init.zeros_)
    weight: Any = layer.weight
    weight.main_grad = torch.empty(OUT, IN)
    x = torch.empty(*TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
    assert _facts(layer(x)[0], dx=x)["dx"] == (x.shape, x.dtype, x.device)


def _embedding() -> Tensor:
    layer = VocabParallelEmbedding(OUT, IN, config=ModelParallelConfig(), init_method=nn.init.zeros_)
    return layer(torch.zeros(TOKENS, dtype=torch.int64))


def _norm() -> Tensor:
    return RMSNorm(IN, eps=1e-6, parallel=ModelParallelConfig())(_input())


def _norm_and_linear() -> Tensor:
    return LayerNormLinear(IN, OUT, bias=True)(_input())


def _parts() -> Tensor:
    weights = [torch.empty(OUT // 2, IN, requires_grad=trains) for trains in (False, True)]
    return linear_with_split_parameters(_input(), weights, [torch.empty(OUT // 2) for _ in weights])


@pytest.mark.parametrize(
    ("layer", "width"), [(_embedding, IN), (_norm, IN), (_norm_and_linear, OUT), (_parts, OUT)]
)  # fmt: skip
def test_other_layers_keep_the_leading_dims(layer: Callable[[], Tensor], width: int) -> None:
    assert _facts(layer())["y"] == ((*TOKENS, width), torch.float32, torch.device("meta"))


def test_losses_have_the_shape_of_their_targets() -> None:
    target, logits, x = torch.zeros(TOKENS, dtype=torch.int64), torch.empty(*TOKENS, OUT, requires_grad=True), _input()
    of_logits = _facts(vocab_parallel_cross_entropy(logits, target), dx=logits)
    of_head = _facts(frozen_head_cross_entropy(x, torch.empty(OUT, IN), target, group=None), dx=x)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(TOKENS)
    assert of_logits["y"] == of_head["y"] == (expected.shape, expected.dtype, expected.device)
    assert (of_logits["dx"][0], of_head["dx"][0]) == (logits.shape, x.shape)


@pytest.mark.parametrize("documents", [None, [[4, 4], [8]]], ids=["whole rows", "documents"])
@pytest.mark.parametrize("autocast", [None, "cpu"])
@pytest.mark.parametrize("dropout", [None, 0.0, 0.1])
@pytest.mark.parametrize("with_labels", [False, True])
def test_the_whole_model(
    dropout: float | None, documents: list[list[int]] | None, autocast: str | None, *, with_labels: bool
) -> None:
    model = CausalLM(DecoderConfig.from_hf(LLAMA), parallel=ModelParallelConfig(params_dtype=torch.bfloat16))
    if dropout is not None:
        apply_lora(model, LoraConfig(r=4, dropout=dropout))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with torch.autocast(autocast, torch.bfloat16) if autocast else contextlib.nullcontext():
        output = model(ids, labels=ids if with_labels else None, document_lengths=documents)
        output.float().sum().backward()
    assert output.shape == ((2, 8) if with_labels else (2, 8, LLAMA["vocab_size"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    assert [(p.grad.shape, p.grad.device) for p in trained if p.grad is not None] == [
        (p.shape, p.device) for p in trained
    ]
