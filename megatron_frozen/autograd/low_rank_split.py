"""Adapters beside a frozen weight that is given in parts, as q, k and v are: what they share is multiplied once.

Shape suffixes: T = tokens, I = in features, O = out features of all parts, R = ranks of all adapters together; with a
small i, those of one part or adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.low_rank import factor_gradient
from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.layout import Fold, fold_leading

Tensors = list[torch.Tensor]
Gradients = list[torch.Tensor | None]


class AdaptedParts(NamedTuple):
    """What the tensors of `FrozenSplitWithAdapters` are: one weight per part, then biases, then all A, then all B."""

    num_parts: int
    has_biases: bool
    adapted: tuple[int, ...]
    """The part that each adapter belongs to, rising."""
    scales: tuple[float, ...]
    """Of each adapter."""
    keeps_concatenation: bool
    """Keep weights that had to be concatenated for the backward; else they are once more."""

    def sorted_out(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Return those of the weights, of the biases, of A and of B."""
        ends = [self.num_parts, self.num_parts * (1 + self.has_biases)]
        ends.append(ends[1] + len(self.adapted))
        return (
            list(tensors[: ends[0]]),
            list(tensors[ends[0] : ends[1]]),
            list(tensors[ends[1] : ends[2]]),
            list(tensors[ends[2] :]),
        )


class FrozenSplitWithAdapters(torch.autograd.Function):
    """Y = X [W_1; ...; W_n]^T + [b_1; ...; b_n], and beside some parts i scale_i * (X A_i^T) B_i^T.

    Shapes: X [..., I], W_i [O_i, I], b_i [O_i] for every part or none, A_i [R_i, I], B_i [O_i, R_i]; Y [..., O]. X, W_i
        and b_i share one dtype; W_i is frozen.
    Forward: X folded to [T, I]; Y = X W^T + b over all parts (see ``gemm.joined_forward``); h = X A^T over all
        adapters; h_i *= scale_i; h_i B_i^T is added to its columns of Y. A and B are cast to X's dtype.
    Dgrad: dY folded to [T, O]; dh_i = scale_i * dY_i B_i; dX = dY W over all parts; dX += dh A over all adapters.
    Wgrad: dA = dh^T X over all adapters that train it; dB_i = dY_i^T h_i; in the factors' gradients' dtypes.
    Dbias: sum of dY over all leading dims, if a bias trains.
    Collectives: none, in either direction; the one entry of X into the region covers all parts.
    Saved: W_i, their concatenation if they do not adjoin and it is to be kept, A_i, B_i, A (thin); X, once, if an A
        trains; h (thin) if a B trains.
    Why: apart, q, k and v read X three times each way, keep it three times, and add up three gradients of its size;
        here base and adapters meet inside the products, and each thin product that parts can share is one.
    """

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, parts: AdaptedParts, *tensors: torch.Tensor) -> torch.Tensor:
        """Return Y; see the class."""
        weights, biases, all_A, all_B = parts.sorted_out(tensors)
        input_TI, fold = fold_leading(input_)
        output_TO, kept = gemm.joined_forward(input_TI, weights, biases)
        if not (parts.keeps_concatenation or torch.compiler.is_compiling()):
            kept = None
        A_RI = torch.cat(all_A).to(input_.dtype)  # thin, so that copying costs less than a product of each
        h_TR = gemm.forward(input_TI, A_RI)
        columns = output_TO.split([weight.shape[0] for weight in weights], dim=1)
        for i, h_TRi, B in zip(parts.adapted, _scaled_parts(h_TR, parts, all_A), all_B, strict=True):
            gemm.add_product_(columns[i], h_TRi, B.to(input_.dtype).t())
        _, _, A_trains, B_trains = parts.sorted_out(ctx.needs_input_grad[2:])
        ctx.save_for_backward(
            input_ if any(A_trains) else None, fold.unfold(h_TR) if any(B_trains) else None, kept, A_RI, *tensors
        )
        ctx.parts = parts
        return fold.unfold_output(output_TO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dX and the gradients of biases, A and B; see the class."""
        input_, h, kept, A_RI, *tensors = ctx.saved_tensors
        weights, biases, all_A, all_B = ctx.parts.sorted_out(tensors)
        _, bias_trains, A_trains, B_trains = ctx.parts.sorted_out(ctx.needs_input_grad[2:])
        grad_TO, fold = fold_leading(grad_output)
        columns = grad_TO.split([weight.shape[0] for weight in weights], dim=1)
        adapted_columns = [columns[i] for i in ctx.parts.adapted]
        grad_input, grad_all_A = None, [None] * len(all_A)
        if ctx.needs_input_grad[0] or any(A_trains):
            thin = [gemm.dgrad(grad, B.to(grad.dtype)) for grad, B in zip(adapted_columns, all_B, strict=True)]
            grad_h_TR = torch.cat(thin, dim=1)
            _scaled_parts(grad_h_TR, ctx.parts, all_A)
            if ctx.needs_input_grad[0]:
                grad_TI = gemm.joined_dgrad(grad_TO, weights, kept)
                gemm.add_product_(grad_TI, grad_h_TR, A_RI)
                grad_input = fold.unfold(grad_TI)
            if any(A_trains):
                grad_all_A = _grad_all_A(grad_h_TR, input_, fold=fold, all_A=all_A, trains=A_trains)
        grad_all_B = [None] * len(all_B)
        if any(B_trains):
            all_h = h.split([A.shape[0] for A in all_A], dim=-1)
            grad_all_B = [
                factor_gradient(fold.unfold(grad), h_i, factors=[B]) if trains else None
                for grad, h_i, B, trains in zip(adapted_columns, all_h, all_B, B_trains, strict=True)
            ]
        grad_biases = [
            gemm.bias_gradient(grad, repeats=fold.repeats, dtype=kept_grad_dtype(bias)) if trains else None
            for grad, bias, trains in zip(columns, biases, bias_trains, strict=False)  # there may be no biases
        ]
        return grad_input, None, *[None] * len(weights), *grad_biases, *grad_all_A, *grad_all_B


def _scaled_parts(h_TR: torch.Tensor, parts: AdaptedParts, all_A: Tensors) -> Sequence[torch.Tensor]:
    """Scale each adapter's columns in place and return them."""
    columns = h_TR.split([A.shape[0] for A in all_A], dim=1)
    if len(set(parts.scales)) == 1:
        h_TR.mul_(parts.scales[0])
    else:
        for h_TRi, scale in zip(columns, parts.scales, strict=True):
            h_TRi.mul_(scale)
    return columns


def _grad_all_A(  # noqa: N802 - as the factor is called
    grad_h_TR: torch.Tensor, input_: torch.Tensor, *, fold: Fold, all_A: Tensors, trains: Sequence[bool]
) -> Gradients:
    """Return dA of each adapter that trains it, as rows of one product."""
    chosen = [j for j in range(len(all_A)) if trains[j]]
    ranks = [A.shape[0] for A in all_A]
    if len(chosen) < len(all_A):
        columns = grad_h_TR.split(ranks, dim=1)
        grad_h_TR = torch.cat([columns[j] for j in chosen], dim=1)
    full = factor_gradient(fold.unfold(grad_h_TR), input_, factors=[all_A[j] for j in chosen])
    gradients: Gradients = [None] * len(all_A)
    for j, rows in zip(chosen, full.split([ranks[j] for j in chosen]), strict=True):
        gradients[j] = rows.to(kept_grad_dtype(all_A[j]))
    return gradients
