"""Rotary embedding against transformers: frequencies of every type, tables, rotation and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_frozen.models.rope import inverse_frequencies, rotary_tables, rotate
from megatron_frozen.models.rope_config import RopeConfig
from tests.unit.models_reference import LLAMA3_ROPE, YARN_ROPE

_MAX_POSITIONS = 128
_ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    LLAMA3_ROPE,
    YARN_ROPE,
    {**YARN_ROPE, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    {**YARN_ROPE, "attention_factor": 0.5},
    {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN_ROPE, "factor": 1.0},
    {**YARN_ROPE, "original_max_position_embeddings": None, "beta_fast": 1.0, "beta_slow": 1.0},
]


def _reference_config(rope: dict[str, Any]) -> LlamaConfig:
    set_values = {name: value for name, value in rope.items() if value is not None}
    return LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=_MAX_POSITIONS, rope_parameters=set_values
    )


@pytest.mark.parametrize("rope", _ROPES, ids=str)
@pytest.mark.parametrize("num_positions", [16, 400])
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], num_positions: int) -> None:
    config = _reference_config(rope)
    if rope["rope_type"] == "default":
        expected, expected_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=num_positions)
    frequencies, factor = inverse_frequencies(
        RopeConfig(**rope), head_dim=32, num_positions=num_positions, max_position_embeddings=_MAX_POSITIONS
    )
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("rope", [_ROPES[0], LLAMA3_ROPE, YARN_ROPE], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_gradient_are_those_of_transformers(rope: dict[str, Any], dtype: torch.dtype) -> None:
    positions = torch.stack((torch.arange(10), torch.arange(30, 40)))  # [b, s]
    query = torch.randn(2, 3, 10, 32, dtype=dtype, requires_grad=True)  # [b, n, s, d]
    cos, sin = LlamaRotaryEmbedding(_reference_config(rope))(query, positions)
    expected, _ = apply_rotary_pos_emb(query, query, cos, sin)
    grad = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, query, grad)

    tables = rotary_tables(
        positions.t(),
        rope=RopeConfig(**rope),
        head_dim=32,
        num_positions=40,
        max_position_embeddings=_MAX_POSITIONS,
        dtype=dtype,
    )
    rotated = rotate(query.permute(2, 0, 1, 3), tables)
    (query_grad,) = torch.autograd.grad(rotated, query, grad.permute(2, 0, 1, 3))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert rotated.dtype == query_grad.dtype == dtype
    torch.testing.assert_close(rotated.permute(1, 2, 0, 3), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(query_grad, expected_grad, rtol=tolerance, atol=tolerance)


def test_rotation_keeps_the_memory_order_and_passes_gradcheck() -> None:
    tables = rotary_tables(
        torch.arange(5)[:, None],
        rope=RopeConfig(),
        head_dim=4,
        num_positions=5,
        max_position_embeddings=8,
        dtype=torch.float64,
    )
    heads = torch.randn(2, 5, 3, 4, dtype=torch.float64).transpose(0, 1).requires_grad_()
    assert rotate(heads, tables).stride() == heads.stride()
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, tables), (heads,))
