"""Passes over bf16 activations as functions of tensors, each rounded to bf16 where torch's own passes round.

A kernel reads what its first tensor's shape says, so that the others' are asserted.

Shape suffixes: [...] at most two leading dims in any memory order, [s] sequence, [b] batch, [n] heads, [h], [2 f], [V]
and [d] the width of a row: hidden size, gate beside up, vocabulary and head dim.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from megatron_frozen.kernels.available import absent
from megatron_frozen.kernels.call import LONG, POINTER, in_memory, run

_MIN_ELEMENTS = 4096  # below, torch's few passes cost no more than the call


class _Rows(ctypes.Structure):
    _fields_ = (("at", POINTER), ("outer_stride", LONG), ("inner_stride", LONG))


def takes(*tensors: torch.Tensor, max_leading: int = 2) -> bool:
    """Return whether these kernels read such tensors here: bf16 on a CPU that has them, rows dense, not in a graph, and
    the first, whose size it is that counts, of at most ``max_leading`` dims before its rows."""
    return (
        tensors[0].device.type == "cpu"
        and tensors[0].dim() <= max_leading + 1
        and all(tensor.dtype == torch.bfloat16 and tensor.stride(-1) == 1 for tensor in tensors)
        and tensors[0].numel() >= _MIN_ELEMENTS
        and not torch.compiler.is_compiling()
        and in_memory(*tensors)
        and absent() is None
    )


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the same shape and memory order, with dense rows also where those of ``tensor`` are
    windows one element apart, which torch makes columns of."""
    made = torch.empty_like(tensor)
    return made if made.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def rms_norm(input_: torch.Tensor, weight: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight * round(input / sqrt(mean(input^2) + eps)) [..., h] and the fp32 inverse roots [..., 1]."""
    assert weight.shape == input_.shape[-1:], f"rows of {input_.shape[-1]} got a weight of {list(weight.shape)}"
    output = like(input_)
    inverse_rms = input_.new_empty((*input_.shape[:-1], 1), dtype=torch.float32)
    run("mf_rms_norm", _shape(input_), _rows(input_, output), POINTER(weight.data_ptr()),
        POINTER(inverse_rms.data_ptr()), ctypes.c_float(eps))  # fmt: skip
    return output, inverse_rms


def rms_norm_backward(
    grad_output: torch.Tensor, input_: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor
) -> torch.Tensor:
    """Return the input's gradient [..., h]."""
    assert grad_output.shape == input_.shape, f"{input_.shape} got a gradient of {grad_output.shape}"
    grad_input = like(input_)
    run("mf_rms_norm_backward", _shape(input_), _rows(input_, grad_output, grad_input), POINTER(weight.data_ptr()),
        POINTER(inverse_rms.data_ptr()))  # fmt: skip
    return grad_input


def gate(joint: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., f] of gate and up beside each other, [..., 2 f]."""
    assert joint.shape[-1] % 2 == 0, f"rows of {joint.shape[-1]} have no halves"
    output = like(joint[..., : joint.shape[-1] // 2])
    run("mf_gate", _shape(output), _rows(joint, output))
    return output


def gate_backward(grad_output: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    """Return the gradient [..., 2 f] of ``joint``."""
    assert (*grad_output.shape[:-1], 2 * grad_output.shape[-1]) == joint.shape, f"{joint.shape} got {grad_output.shape}"
    grad_joint = like(joint)
    run("mf_gate_backward", _shape(grad_output), _rows(joint, grad_output, grad_joint))
    return grad_joint


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sign: float, out: torch.Tensor) -> None:
    """Write heads [s, b, n, d] rotated by the angles of cos [s, b or 1, 1, d] and ``sign`` times sin [s, b or 1, 1,
    d / 2] into ``out`` of their shape."""
    head_dim = heads.shape[-1]
    fit = head_dim % 2 == 0 and (cos.shape[-1], sin.shape[-1]) == (head_dim, head_dim // 2) and out.shape == heads.shape
    assert fit, f"heads {heads.shape} got tables {cos.shape} and {sin.shape} and an output {out.shape}"
    tables = [table.expand(*heads.shape[:2], 1, table.shape[-1])[:, :, 0] for table in (cos, sin)]
    strides = (LONG * 2)(heads.stride(2), out.stride(2))
    run("mf_rotate", _shape(heads[:, :, 0]), _rows(heads[:, :, 0], out[:, :, 0], *tables), LONG(heads.shape[2]),
        strides, ctypes.c_float(sign))  # fmt: skip


def softmax_(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits [..., V] into their softmax in place and return, in fp32 [...], their maximum and the sum of their
    exponentials below it."""
    return _row_sums("mf_softmax", logits)


def logsumexp(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, in fp32 [...], the maximum of logits [..., V], not below the lowest number, and the sum of their
    exponentials below it."""
    return _row_sums("mf_logsumexp", logits)


def _row_sums(name: str, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top, total = logits.new_empty((2, *logits.shape[:-1]), dtype=torch.float32)
    run(name, _shape(logits), _rows(logits), POINTER(top.data_ptr()), POINTER(total.data_ptr()))
    return top, total


def softmax_gradient(
    logits: torch.Tensor, top: torch.Tensor, factor: torch.Tensor, column: torch.Tensor, at_column: torch.Tensor
) -> torch.Tensor:
    """Return exp(logits - top) * factor [..., V] in the logits' memory order, 0 in rows whose factor is 0, and at one
    ``column`` of each row what is given for it; top, factor, at_column are fp32 [...] or [..., 1], column integer."""
    grad = like(logits)
    per_row = [part.contiguous() for part in (top, factor, column.long(), at_column)]
    assert {part.numel() for part in per_row} == {logits.shape[:-1].numel()}, f"{logits.shape} got {column.shape}"
    run("mf_softmax_gradient", _shape(logits), _rows(logits, grad), *(POINTER(part.data_ptr()) for part in per_row))
    return grad


def parts_of_sums(rows: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the sums of rows [r, n, h] over n, made in fp32, as ``num_parts`` matrices [r, h] that add up to them, one
    below the other: [num_parts * r, h]."""
    assert rows.dim() == 3, f"rows to sum have the shape {rows.shape}"
    parts = rows.new_empty(num_parts * rows.shape[0], rows.shape[-1])
    run("mf_parts_of_sums", _shape(rows), _rows(rows), POINTER(parts.data_ptr()), LONG(num_parts))
    return parts


def _shape(tensor: torch.Tensor) -> Any:
    outer, inner = (1, 1, *tensor.shape[:-1])[-2:]
    return (LONG * 3)(outer, inner, tensor.shape[-1])


def _rows(*tensors: torch.Tensor) -> Any:
    strides = ((0, 0, *tensor.stride()[:-1])[-2:] for tensor in tensors)
    return (_Rows * len(tensors))(*(_Rows(t.data_ptr(), *s) for t, s in zip(tensors, strides, strict=True)))
