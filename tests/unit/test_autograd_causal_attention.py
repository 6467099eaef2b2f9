"""Causal attention in blocks: values against fp64, layouts, what it leaves to torch, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen import kernels
from megatron_frozen.autograd.causal_attention import (
    MIN_LENGTH,
    CausalAttention,
    causal_attention_unsupported,
)
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.testing import relative_error
from tests.unit.cpu_kernels import needs_kernels

SHAPES = [(1, 3, 1, 256, 16), (2, 4, 4, 300, 48), (2, 6, 2, 513, 64), (1, 2, 1, 384, 80), (5, 4, 2, 64, 22)]


def heads(shape: tuple[int, ...], *, sequence_first: bool = True) -> tuple[Tensor, ...]:
    """Q, K, V and dC; in the decoder's memory order, [b, s, n, d], or dense as they are."""
    b, n, k, s, d = shape
    generator = torch.Generator().manual_seed(0)
    made = []
    for count in (n, k, k, n):
        size = (b, s, count, d) if sequence_first else (b, count, s, d)
        tensor = (2 * torch.randn(size, generator=generator)).bfloat16()
        made.append(tensor.transpose(1, 2) if sequence_first else tensor)
    return tuple(made)


def with_gradients(function, *given: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    context = function(*leaves)
    context.backward(grad.to(context.dtype))
    gradients = [leaf.grad for leaf in leaves]
    return [context.detach(), *(gradient for gradient in gradients if gradient is not None)]


def torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sequence_first", [True, False])
def test_values_are_no_further_from_fp64_than_torchs(shape: tuple[int, ...], sequence_first: bool) -> None:  # noqa: FBT001
    *given, grad = heads(shape, sequence_first=sequence_first)
    exact = with_gradients(torch_attention, *(tensor.double() for tensor in given), grad=grad.double())
    theirs = with_gradients(torch_attention, *given, grad=grad)
    ours = with_gradients(CausalAttention.apply, *given, grad=grad)
    assert len(ours) == 4
    for name, value, other, reference in zip(("C", "dQ", "dK", "dV"), ours, theirs, exact, strict=True):
        assert value.shape == reference.shape
        # P and the context are rounded to bf16 each; torch rounds the gradients of shared keys once more.
        assert relative_error(value, reference) < max(1.4 * relative_error(other, reference), 3e-3), name


@needs_kernels
def test_a_later_token_changes_nothing_before_it() -> None:
    query, key, value, _ = heads(SHAPES[2])
    before = CausalAttention.apply(query, key, value)
    for tensor in (query, key, value):
        tensor[:, :, 400:] = 7.0
    after = CausalAttention.apply(query, key, value)
    assert torch.equal(before[:, :, :400], after[:, :, :400])
    assert not torch.equal(before[:, :, 400:], after[:, :, 400:])


@needs_kernels
def test_expanded_gradients_and_inputs_from_one_buffer() -> None:
    shape = SHAPES[1]
    b, n, k, s, d = shape
    joint = torch.randn(b, s, (n + 2 * k) * d).bfloat16()
    parts = [part.unflatten(-1, (-1, d)).transpose(1, 2) for part in joint.split([n * d, k * d, k * d], dim=-1)]
    grad = torch.ones(()).bfloat16().expand(b, n, s, d)
    exact = with_gradients(torch_attention, *(part.double() for part in parts), grad=grad)
    for value, reference in zip(with_gradients(CausalAttention.apply, *parts, grad=grad), exact, strict=True):
        assert relative_error(value, reference) < 2e-2  # the gradient of a sum over tokens cancels


@needs_kernels
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # as torch's own attention warns
@pytest.mark.parametrize("is_cut", [False, True])
def test_many_gradients_at_once(is_cut: bool) -> None:  # noqa: FBT001
    """Under vmap a gradient has no address."""
    *given, grad = heads((2, 4, 2, 130, 16))
    leaves = [tensor.requires_grad_() for tensor in given]
    first_keys = torch.arange(130, dtype=torch.int32).div(50, rounding_mode="floor").mul(50).expand(2, -1).contiguous()
    context = CausalAttention.apply(*leaves, first_keys if is_cut else None)
    upstream = torch.stack([grad, grad.flip(2)])
    together = torch.autograd.grad(context, leaves, upstream, is_grads_batched=True, retain_graph=True)
    for index, one in enumerate(upstream):
        alone = torch.autograd.grad(context, leaves, one, retain_graph=True)
        for ours, theirs in zip(alone, together, strict=True):
            assert relative_error(theirs[index], ours.double()) < 8e-3


@needs_kernels
def test_no_scores_of_the_whole_sequence_are_held() -> None:
    b, n, k, s, d = 1, 2, 1, 2048, 16
    *given, grad = heads((b, n, k, s, d))
    leaves = [tensor.requires_grad_() for tensor in given]
    with Recorder() as seen:
        CausalAttention.apply(*leaves).backward(grad)
    whole = n * s * s * 2  # bytes of all scores in bf16
    assert max(operation.written_bytes for operation in seen.operations) < whole / 2


def test_what_is_left_to_torch() -> None:
    query, key, value, _ = heads((1, 2, 1, MIN_LENGTH, 16))
    assert causal_attention_unsupported(query.float(), key.float(), value.float()) == causal_attention_unsupported(
        query, key, value.float()
    )
    assert causal_attention_unsupported(query.float(), key.float(), value.float()) == "it is for bf16 tensors on a CPU"
    short = causal_attention_unsupported(*(part[:, :, : MIN_LENGTH - 1] for part in (query, key, value)))
    assert short == (
        f"it is for {MIN_LENGTH} tokens or more, each a query and a key, an even head dim, and as many query heads "
        "for each head of both key and value"
    )
    assert causal_attention_unsupported(query, key[:, :, 1:], value[:, :, 1:]) == short
    assert causal_attention_unsupported(query[..., :15], key[..., :15], value[..., :15]) == short
    expected = "torch's own kernel is fast with AMX" if torch.cpu._is_amx_tile_supported() else kernels.absent()
    assert causal_attention_unsupported(query, key, value[..., :8]) == short
    assert causal_attention_unsupported(query.expand(3, -1, -1, -1), key, value) == short
    assert causal_attention_unsupported(query, key.expand(-1, 2, -1, -1), value) == short
    assert causal_attention_unsupported(query[:, :1], *(part.expand(-1, 2, -1, -1) for part in (key, value))) == short
    assert causal_attention_unsupported(query, key[:, :0], value[:, :0]) == short
    assert causal_attention_unsupported(query, key, value) == expected
