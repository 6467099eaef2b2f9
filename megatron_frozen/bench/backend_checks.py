"""Whether a matrix backend keeps its word on a device: each case against fp64, its outcome a row.

Shape suffixes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_frozen.bench.runner import Row
from megatron_frozen.gemm import select
from megatron_frozen.gemm.request import Backend, Product, Request

# A product rounded to bf16 errs by 2e-3, to fp16 by 2e-4. Sums in fp32 err by 1e-7 and, where tensor cores cut the
# addends off instead of rounding them, by some more.
TOLERANCE = 1e-5
DTYPES = (torch.bfloat16, torch.float16)
_GAP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing that a backend must do."""

    name: str
    """What is checked."""
    product: Product = Product.WGRAD
    """Which product."""
    accumulate: bool = False
    """Add to the output; else write over NaN."""
    with_bias: bool = False
    """With a bias, in the operands' dtype, or with a bias gradient."""
    num_tokens: int = 384
    """Tokens of one micro-batch."""
    num_micro_batches: int = 1
    """How many are added one after the other."""
    strided: bool = False
    """Operands with gaps between their elements, one of them transposed."""
    gapped_output: bool = False
    """An output whose rows stand apart in a larger buffer."""
    counting: bool = False
    """Operands of 256 in the first micro-batch and 1 in the next: 257 has no bf16."""


CASES = (
    Case(name="overwrite a NaN bucket"),
    Case(name="accumulate", accumulate=True),
    Case(name="64 micro-batches", accumulate=True, num_micro_batches=64),
    Case(name="256, then 1", accumulate=True, num_tokens=1, num_micro_batches=2, counting=True),
    Case(name="no tokens, overwrite", num_tokens=0),
    Case(name="no tokens, accumulate", accumulate=True, num_tokens=0),
    Case(name="one token", num_tokens=1),
    Case(name="strided operands, overwrite", strided=True),
    Case(name="strided operands, accumulate", strided=True, accumulate=True),
    Case(name="rows apart in the output, overwrite", gapped_output=True),
    Case(name="rows apart in the output, accumulate", gapped_output=True, accumulate=True),
    Case(name="bias gradient", with_bias=True),
    Case(name="bias gradient, accumulate", with_bias=True, accumulate=True),
    Case(name="forward", product=Product.FORWARD),
    Case(name="forward with a bias of the operands' dtype", product=Product.FORWARD, with_bias=True),
    Case(name="forward, strided operands", product=Product.FORWARD, strided=True),
    Case(name="dgrad", product=Product.DGRAD),
    Case(name="dgrad, strided operands", product=Product.DGRAD, strided=True),
)


def check_backends(device: str, *, in_features: int, out_features: int) -> Iterator[Row]:
    """Yield a row for each backend of the device type, dtype and case.

    outcome: ok; wrong, by more than TOLERANCE; cannot, with the backend's reason; failed, with the error. A weight has
    ``in_features`` x ``out_features``."""
    for backend in select.backends(device):
        for dtype in DTYPES:
            for case in CASES:
                yield {
                    "kind": "check",
                    "backend": backend.NAME,
                    "check": case.name,
                    "operands": str(dtype)[6:],
                    **_outcome(backend, case, dtype=dtype, device=device, sizes=(out_features, in_features)),
                }


def _outcome(backend: Backend, case: Case, *, dtype: torch.dtype, device: str, sizes: tuple[int, int]) -> Row:
    request = Request(
        product=case.product,
        device_type=device,
        operand_dtype=dtype,
        output_dtype=torch.float32,
        accumulate=case.accumulate,
        with_bias=case.with_bias,
    )
    reason = backend.unsupported(request)
    if reason is not None:
        return {"outcome": "cannot", "reason": reason}
    try:
        error = _error(request, case, wish=backend.NAME, sizes=sizes)
    except Exception as failure:  # whatever a library raises is one backend's outcome, and the others' turn comes
        return {"outcome": "failed", "reason": f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"}
    return {"outcome": "ok" if error <= TOLERANCE else "wrong", "relative_error": error}


def _error(request: Request, case: Case, *, wish: str, sizes: tuple[int, int]) -> float:
    """Return the largest relative error of the output and the bias gradient; infinite for NaN, or if what stands
    around the output changed.
    """
    generator = torch.Generator(request.device_type).manual_seed(0)
    out, buffer = _output(request, case, sizes=sizes, generator=generator)
    total = out.double() if case.accumulate else torch.zeros_like(out, dtype=torch.float64)
    around = _around(out, buffer)
    bias = torch.randn(sizes[0], generator=generator, device=out.device).to(request.operand_dtype)
    errors = []
    for index in range(case.num_micro_batches):
        left, right = _operands(request, case, sizes=sizes, generator=generator, index=index)
        added = bias if case.with_bias and case.product is Product.FORWARD else None
        _, bias_gradient = select.multiply(request, left, right, out=out, bias=added, wish=wish)
        total += _exact(request.product, left, right) + (0 if added is None else added.double())
        if case.with_bias and case.product is Product.WGRAD:
            assert bias_gradient is not None, "it gave no bias gradient"
            assert bias_gradient.dtype == torch.float32, f"its bias gradient is {bias_gradient.dtype}"
            errors.append(_relative(bias_gradient, left.double().sum(0)))
    return max(_relative(out, total), *errors, 0.0 if torch.equal(_around(out, buffer), around) else math.inf)


def _around(out: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    copy = buffer.clone()
    copy[: out.shape[0], : out.shape[1]] = 0
    return copy


def _relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    error = float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error


def _exact(product: Product, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    request = Request(
        product=product, device_type=left.device.type, operand_dtype=torch.float64, output_dtype=torch.float64
    )
    return select.multiply(request, left.double(), right.double(), wish="reference")[0]


def _operands(
    request: Request, case: Case, *, sizes: tuple[int, int], generator: torch.Generator, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    (O, I), T = sizes, case.num_tokens  # noqa: E741
    shapes = {Product.FORWARD: ((T, I), (O, I)), Product.DGRAD: ((T, O), (O, I)), Product.WGRAD: ((T, O), (T, I))}
    left, right = (
        torch.randn(shape, generator=generator, device=request.device_type).to(request.operand_dtype)
        for shape in shapes[request.product]
    )
    if case.counting:
        left.fill_(256 if index == 0 else 1)
        right.fill_(1)
    if not case.strided:
        return left, right
    spread = right.new_zeros(right.shape[0], 2 * right.shape[1])
    spread[:, ::2] = right
    return left.t().contiguous().t(), spread[:, ::2]


def _output(
    request: Request, case: Case, *, sizes: tuple[int, int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the buffer whose upper left corner it is."""
    (O, I), T = sizes, case.num_tokens  # noqa: E741
    rows, columns = {Product.FORWARD: (T, O), Product.DGRAD: (T, I), Product.WGRAD: (O, I)}[request.product]
    gap = _GAP if case.gapped_output else 0
    buffer = torch.randn(rows + gap, columns + gap, generator=generator, device=request.device_type)
    out = buffer[:rows, :columns]
    if not case.accumulate:
        out.fill_(math.nan)
    elif case.counting:
        out.zero_()
    return out, buffer
