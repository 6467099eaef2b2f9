"""What the backends of optional CUDA libraries share: their import, and operands for kernels that take bare
addresses.

Such a kernel reads a tensor as its address and sizes: strides are ignored, sizes are 32-bit integers, and what does
not fit is read past its end. `select.multiply` has checked sizes, dtypes and devices; they are asserted here once
more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_frozen.errors import LayoutError
from megatron_frozen.gemm.request import INT32_MAX, Request, result_shape


def import_failure(error: Exception, *, library: str) -> str:
    """Return why ``library`` is not there, as the end of a sentence: a broken install raises whatever it likes."""
    if isinstance(error, ModuleNotFoundError) and error.name == library:
        return f"{library} is not installed"
    return f"{library} is installed but fails to import ({type(error).__name__}: {' '.join(str(error).split())})"


def dense_operands(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, library: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands without gaps, copied where they have any.

    Raises LayoutError for sizes above 2^31 - 1, before any copy.
    """
    operands = {(tensor.dim(), tensor.dtype, tensor.device) for tensor in (left, right)}
    assert operands == {(2, request.operand_dtype, out.device)}, f"{request} got operands {operands}"
    assert out.dtype == request.output_dtype, f"{request} got an output of {out.dtype}"
    assert tuple(out.shape) == result_shape(request.product, left, right), f"{request} got an output {out.shape}"
    if max(*left.shape, *right.shape) > INT32_MAX:
        raise LayoutError(
            f"{library} was given operands {list(left.shape)} and {list(right.shape)} with a size above {INT32_MAX}, "
            f"the most that its 32-bit sizes hold; cut the tokens into parts"
        )
    return left.contiguous(), right.contiguous()


@contextmanager
def dense_output(request: Request, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give ``out``, or where it has gaps a dense stand-in that is copied back: values are as if written in place."""
    if out.is_contiguous():
        yield out
        return
    dense = out.contiguous() if request.accumulate else torch.empty_like(out, memory_format=torch.contiguous_format)
    yield dense
    out.copy_(dense)
