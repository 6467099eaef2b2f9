"""What is asked of a matrix backend.

Shape suffixes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch

INT32_MAX = 2**31 - 1


class Product(enum.Enum):
    """The three products of a linear layer; the values are Transformer Engine's layouts of them."""

    FORWARD = "TN"
    """Y[T, O] = X[T, I] W[O, I]^T, operands given as (X, W)."""
    DGRAD = "NN"
    """dX[T, I] = dY[T, O] W[O, I], operands given as (dY, W)."""
    WGRAD = "NT"
    """dW[O, I] = dY[T, O]^T X[T, I], operands given as (dY, X)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One kind of product, without its operands: what a backend is chosen by."""

    product: Product
    """Which of the three."""
    device_type: str
    """Device type of all tensors, such as cuda."""
    operand_dtype: torch.dtype
    """Dtype of both operands."""
    output_dtype: torch.dtype
    """Dtype of the result; equal to the operands' or wider."""
    accumulate: bool = False
    """Add to what the output holds (beta 1); else write over it, NaN included (beta 0)."""
    with_bias: bool = False
    """Add a bias to a forward product; give the bias gradient with a weight gradient."""

    def __str__(self) -> str:
        """Say the request as part of a sentence."""
        into = "added to" if self.accumulate else "into"
        dtypes = f"{str(self.operand_dtype)[6:]} operands {into} {str(self.output_dtype)[6:]}"
        return f"{self.product.name.lower()} on {self.device_type}, {dtypes}{' with bias' if self.with_bias else ''}"


class Backend(Protocol):
    """What each backend's file holds. Operands are 2-D, of one dtype and device, of any strides, none empty."""

    NAME: str

    def unsupported(self, request: Request) -> str | None:
        """Return why the request cannot be served here, as the end of a sentence; None if it can."""
        ...

    def run(
        self,
        request: Request,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Write the product into ``out`` [2-D, any strides]; return the bias gradient where it was asked for."""
        ...


def oriented(product: Product, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views A[M, K] and B[K, N] whose plain matrix product is the asked one."""
    if product is Product.FORWARD:
        return left, right.t()
    if product is Product.DGRAD:
        return left, right
    return left.t(), right


def result_shape(product: Product, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
    """Return [M, N] of the product."""
    A, B = oriented(product, left, right)
    return A.shape[0], B.shape[1]


def bias_sum(request: Request, grad_output_TO: torch.Tensor) -> torch.Tensor | None:
    """Return db [O] in the output dtype where a weight gradient asks for it: the form for backends without an
    epilogue.
    """
    if request.with_bias and request.product is Product.WGRAD:
        return grad_output_TO.sum(0, dtype=request.output_dtype)
    return None


def add_bias_(request: Request, out_TO: torch.Tensor, bias_O: torch.Tensor | None) -> None:
    """Add the bias of a forward product to its finished output, in the output's dtype."""
    if request.with_bias and request.product is Product.FORWARD:
        assert bias_O is not None
        out_TO.add_(bias_O.to(out_TO.dtype))
