"""Products with a weight that is given in parts, which stand one above the other as the rows of one.

Where the parts adjoin in memory the product reads them in place; where they do not, they are concatenated, once for
the forward and the backward of a step. Which it is, is seen when the product runs: a compiled graph holds operators
that look then, so that parts may move after compiling.

Shape suffixes: T = tokens, I = in features, O = out features of all parts.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from megatron_frozen.gemm import products
from megatron_frozen.storage import adjacent_view, concatenate, join

# A graph's saved tensors have fixed shapes, and a concatenation that may not exist has none; so its graph saves a
# number, and the concatenation lives here as long as the memory of that number does.
_KEPT: dict[int, torch.Tensor] = {}
_NUMBERS = itertools.count(1)


def joined_forward(
    input_TI: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return Y = X W^T + b as [T, O], and what ``joined_dgrad`` of the same weights wants to be given.

    weights: [O_i, I] each; biases: [O_i] each, or none at all. ``dtype``, if wider than the operands', is that of Y.
    """
    if torch.compiler.is_exporting():  # the graph goes to a runtime that has no operator of ours
        bias = torch.cat(biases) if biases else None
        return products.forward(input_TI, torch.cat(weights), bias, dtype=dtype), None
    if torch.compiler.is_compiling():
        return _joined_forward(input_TI, weights, biases, dtype)
    view = adjacent_view(weights)
    weight = concatenate(weights) if view is None else view
    output = products.forward(input_TI, weight, join(biases) if biases else None, dtype=dtype)
    return output, weight if view is None else None


def joined_dgrad(
    grad_output_TO: torch.Tensor, weights: list[torch.Tensor], kept: torch.Tensor | None, *, in_fp32: bool = False
) -> torch.Tensor:
    """Return dX = dY W as [T, I]; ``kept`` comes from the forward product."""
    # A number, that is: compiled autograd traces the backward of an eager forward too, which keeps the tensor itself.
    if torch.compiler.is_compiling() and kept is not None and kept.dim() == 0:
        return _joined_dgrad(grad_output_TO, weights, kept, in_fp32)
    return products.dgrad(grad_output_TO, join(weights) if kept is None else kept, in_fp32=in_fp32)


@torch.library.custom_op("megatron_frozen::joined_forward", mutates_args=())
def _joined_forward(
    input_TI: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``joined_forward`` does; what it keeps is called by a number, 0 for nothing."""
    output, kept = joined_forward(input_TI, weights, biases, dtype=dtype)
    number = 0 if kept is None else next(_NUMBERS)
    token = torch.tensor(number, device="cpu")
    if kept is not None:
        _KEPT[number] = kept
        weakref.finalize(token.untyped_storage(), _KEPT.pop, number, None)
    return output, token


@_joined_forward.register_fake
def _(
    input_TI: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shapes."""
    output = input_TI.new_empty(input_TI.shape[0], sum(weight.shape[0] for weight in weights), dtype=dtype)
    return output, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("megatron_frozen::joined_dgrad", mutates_args=())
def _joined_dgrad(
    grad_output_TO: torch.Tensor,
    weights: list[torch.Tensor],
    token: torch.Tensor,
    in_fp32: bool,  # noqa: FBT001 - operators take no keywords from a graph
) -> torch.Tensor:
    """Do what ``joined_dgrad`` does; a concatenation that is gone is made anew."""
    return joined_dgrad(grad_output_TO, weights, _KEPT.get(int(token)), in_fp32=in_fp32)


@_joined_dgrad.register_fake
def _(
    grad_output_TO: torch.Tensor,
    weights: list[torch.Tensor],
    token: torch.Tensor,
    in_fp32: bool,  # noqa: FBT001
) -> torch.Tensor:
    """Return the shape."""
    widens = in_fp32 and grad_output_TO.dtype in products.LOW_PRECISION
    dtype = torch.float32 if widens else None
    return grad_output_TO.new_empty(grad_output_TO.shape[0], weights[0].shape[1], dtype=dtype)
