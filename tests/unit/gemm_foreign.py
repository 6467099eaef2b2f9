"""CUDA kernels as their sources describe them, on the CPU: they see addresses and sizes, never strides.

They stand in for Transformer Engine's `tex.generic_gemm` and apex's extension, neither of which runs without CUDA.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_frozen.gemm.request import Product, Request, result_shape

TOKENS, IN, OUT = 33, 7, 5
LOW = [torch.bfloat16, torch.float16]


def seen(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a kernel sees which gets address and sizes only."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
    return flat.view(tensor.shape)


def layout_product(A: torch.Tensor, B: torch.Tensor, *, layout: str) -> torch.Tensor:
    """op(B) op(A) in fp32, a T in the layout meaning that A is transposed, or B (contracts 1.3)."""
    left = seen(B).float().t() if layout[1] == "T" else seen(B).float()
    right = seen(A).float().t() if layout[0] == "T" else seen(A).float()
    return left @ right


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    layout: str,
    out: torch.Tensor,
    accumulate: bool,
    bias: torch.Tensor | None,
    grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Transformer Engine's semantics: the output's sums are rounded once; a bias is read in the output's dtype."""
    total = layout_product(A, B, layout=layout)
    if accumulate:
        total += seen(out).float()
    if bias is not None and not grad:
        total += seen(bias).view(out.dtype).float()
    seen(out).copy_(total)
    bias_gradient = seen(B).float().sum(0).to(out.dtype) if grad and bias is not None else None
    return out, bias_gradient, None, None


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Make ``import name`` give a module of these contents, and each parent one of none."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for key, value in contents.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


def make_request(product: Product, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Request:
    changes = {"device_type": "cpu", "output_dtype": torch.float32} | changes
    return Request(product=product, operand_dtype=dtype, **changes)


def operands(request: Request, *, gaps: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands, an output (NaN where it is to be overwritten) and a bias; with gaps: transposed or sliced views."""
    torch.manual_seed(0)
    shapes = {
        Product.FORWARD: ((TOKENS, IN), (OUT, IN)),
        Product.DGRAD: ((TOKENS, OUT), (OUT, IN)),
        Product.WGRAD: ((TOKENS, OUT), (TOKENS, IN)),
    }[request.product]
    left, right = (torch.randn(*shape).to(request.operand_dtype) for shape in shapes)
    shape = result_shape(request.product, left, right)
    out = torch.randn(*shape).to(request.output_dtype) if request.accumulate else torch.full(shape, torch.nan)
    out = out.to(request.output_dtype)
    bias = torch.randn(OUT).to(request.operand_dtype)
    if gaps:
        left, out = left.t().contiguous().t(), out.t().contiguous().t()
        right = torch.cat([right, right], 1)[:, : right.shape[1]]
        bias = bias.repeat_interleave(2)[::2]
    return left, right, out, bias
