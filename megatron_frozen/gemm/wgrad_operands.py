"""The two matrices whose product is a weight gradient, without the rows that an operand only repeats.

dW = sum over tokens of dY_t^T X_t. Where dY repeats one row n times (stride 0: the gradient of a sum over a leading
dim), the n products that it has a part in are one, with the sum of the n rows of X; and the same with dY and X
exchanged. The sum is made in at least fp32. Where the operands' dtype cannot hold it, it is handed on as several
matrices that add up to it (bf16: for a bf16 result of up to 16 repeats two, for fp64 seven, else three), each the
rounding of what the ones before it left over (the split of a number that Dekker 1971 and, for matrix units, Markidis et
al. 2018 use), one below the other, so that it is still one product.

Shape suffixes: R = rows of a fold, M = columns of dY, N = columns of X.
"""

from __future__ import annotations

import math

import torch

from megatron_frozen.gemm.autocast import without_autocast
from megatron_frozen.kernels import is_recording, passes
from megatron_frozen.layout import fold_pair, repeated_dims

# Significant binary digits. fp16 is not here: sums of everyday size leave its range of 65504.
_DIGITS = {torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
# Beyond the result's, and those that counting the rows takes: sums that cancel down to one row still keep it.
_GUARD_DIGITS = 4


def wgrad_operands(
    grad_output: torch.Tensor, total_input: torch.Tensor, *, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dY [..., M] and X [..., N] as [R, M] and [R, N] whose product dY^T X, rounded to ``dtype``, is dW [M, N].

    Both keep their dtype. Where one repeats each row more often than the sum has parts, the other's are summed: the
    parts are written, and of more than one part the distinct rows are copied for each. Else this is ``fold_pair``,
    which says what it copies, as in a compiled or recorded graph. An infinite element, or a sum (or a part of one)
    beyond the range of the operands' dtype, may make a gradient infinite or NaN that was not; no element that is not
    finite is lost. No collectives.

    Raises LayoutError where the leading dims differ."""
    is_dense = grad_output.is_contiguous() and total_input.is_contiguous()
    # Inductor takes the rounding out of what is left over, which loses the parts but the first.
    may_sum = not is_dense and not torch.compiler.is_compiling() and not is_recording()
    if may_sum and grad_output.shape[:-1] == total_input.shape[:-1]:  # fold_pair refuses others
        grad_dims, grad_repeats = _repeats(grad_output)
        input_dims, input_repeats = _repeats(total_input)
        repeats = max(grad_repeats, input_repeats)
        num_parts = _num_parts(total_input.dtype, dtype, num_summed=repeats)
        if 0 < num_parts < repeats:
            with without_autocast(total_input):
                if grad_repeats == repeats:
                    return _summed(grad_output, total_input, dims=grad_dims, dtype=dtype, num_parts=num_parts)
                input_RN, grad_RM = _summed(total_input, grad_output, dims=input_dims, dtype=dtype, num_parts=num_parts)
                return grad_RM, input_RN
    return fold_pair(grad_output, total_input)


def _num_parts(operand: torch.dtype, result: torch.dtype, *, num_summed: int) -> int:
    """Return how many matrices in the operands' dtype a sum of their rows must be cut into; 0 if none can hold it."""
    if operand not in _DIGITS or result not in _DIGITS:
        return 0
    digits = min(_DIGITS[_wide(operand, result)], _DIGITS[result] + (num_summed - 1).bit_length() + _GUARD_DIGITS)
    return -(-digits // _DIGITS[operand])


def _wide(operand: torch.dtype, result: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.promote_types(operand, result), torch.float32)


def _repeats(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the dims along which rows repeat, and how often each row stands there."""
    dims = repeated_dims(tensor.shape, tensor.stride())
    return dims, math.prod(tensor.shape[dim] for dim in dims)


def _summed(
    repeating: torch.Tensor, other: torch.Tensor, *, dims: tuple[int, ...], dtype: torch.dtype, num_parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct rows of ``repeating``, once for each part, and beside them the parts of the other's sums over
    ``dims``, along which it repeats them."""
    for dim in reversed(dims):
        repeating = repeating.select(dim, 0)
    distinct_RM = _matrix(repeating)
    parts_RN = _parts_of_sums(other, dims=dims, dtype=_wide(other.dtype, dtype), num_parts=num_parts)
    return distinct_RM if num_parts == 1 else torch.cat([distinct_RM] * num_parts), parts_RN


def _parts_of_sums(tensor: torch.Tensor, *, dims: tuple[int, ...], dtype: torch.dtype, num_parts: int) -> torch.Tensor:
    """Return the sums [..., N] over ``dims``, made in ``dtype``, as [num_parts * R, N]."""
    kept = tuple(dim for dim in range(tensor.dim() - 1) if dim not in dims)
    times = 1  # that each row stands in the tensor: one rounding, where torch's sum of so many equal rows drifts
    for dim in dims:
        if tensor.stride(dim) == 0:
            times *= tensor.shape[dim]
            tensor = tensor.narrow(dim, 0, 1)
    if times == 1 and dtype is torch.float32 and passes.takes(tensor, max_leading=tensor.dim()):
        grouped = tensor.permute(*kept, *dims, -1).flatten(len(kept), -2)
        return passes.parts_of_sums(grouped.unsqueeze(0).flatten(0, -3), num_parts)
    rest_RN = _matrix(tensor.sum(dims, dtype=dtype))
    if times > 1:
        rest_RN.mul_(times)
    parts = [rest_RN.to(tensor.dtype)]
    while len(parts) < num_parts:
        rest_RN = rest_RN - parts[-1]
        parts.append(rest_RN.to(tensor.dtype))
    return torch.cat(parts) if num_parts > 1 else parts[0]


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
