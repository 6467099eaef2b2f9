"""Which backend serves a request: the first of a documented order that can, or the one that was asked for by name.

| device | order |
|---|---|
| cuda | torch_cuda, transformer_engine, apex, reference |
| cpu | brgemm, mkl, reference |
| other | reference |

The reference is portable and exact, and copies the operands in the output's dtype. On a CPU it also serves what is so
small that those copies cost less than a call. A choice is made once per request."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch

from megatron_frozen import environment, kernels
from megatron_frozen.errors import ConfigError, LayoutError, nearest
from megatron_frozen.gemm import apex, brgemm, mkl, reference, torch_cuda, transformer_engine
from megatron_frozen.gemm.autocast import without_autocast
from megatron_frozen.gemm.request import Backend, Product, Request, add_bias_, bias_sum, oriented, result_shape

_ORDER: dict[str, tuple[Backend, ...]] = {
    "cuda": cast("tuple[Backend, ...]", (torch_cuda, transformer_engine, apex, reference)),
    "cpu": cast("tuple[Backend, ...]", (brgemm, mkl, reference)),
}
_ELSEWHERE: tuple[Backend, ...] = (cast(Backend, reference),)
_SMALL = 2**21  # multiply-adds below which the others were not faster than the reference on a CPU
BACKENDS: dict[str, Backend] = {backend.NAME: backend for order in _ORDER.values() for backend in order}


def choose(request: Request, *, wish: str | None = None) -> Backend:
    """Return the backend for ``request``: ``wish``, else MEGATRON_FROZEN_GEMM, else the first of the order that can.

    Raises ConfigError for a wish that is unknown or cannot serve the request, with the reason.
    """
    return _chosen(request, _wish(wish))


def _wish(wish: str | None) -> str | None:
    return wish if wish is not None else environment.text(environment.GEMM_BACKEND)


def _shares_places(matrix: torch.Tensor) -> bool:
    """Return whether elements of the matrix lie on one another, as expanded rows do; also if rows and columns are
    interleaved."""
    (inner, num_inner), (outer, num_outer) = sorted(zip(matrix.stride(), matrix.shape, strict=True))
    return (num_inner > 1 and inner == 0) or (num_outer > 1 and num_inner > 0 and outer <= inner * (num_inner - 1))


@lru_cache(maxsize=1024)
def _chosen(request: Request, wish: str | None) -> Backend:
    if wish is not None:
        if wish not in BACKENDS:
            raise ConfigError(
                f"the gemm backend '{wish}' is unknown{nearest(wish, BACKENDS)}; choose one of {', '.join(BACKENDS)}"
            )
        reason = BACKENDS[wish].unsupported(request)
        if reason is not None:
            raise ConfigError(f"the gemm backend '{wish}' cannot serve {request}: {reason}; leave the choice open")
        return BACKENDS[wish]
    for backend in backends(request.device_type):
        if backend.unsupported(request) is None:
            return backend
    raise ConfigError(f"no gemm backend serves {request}; give floating-point tensors")


def multiply(
    request: Request,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    wish: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the product in ``request.output_dtype``, written into ``out`` if given, and the bias gradient if asked
    for.

    Operands are 2-D as ``Product`` says, of any strides; no tokens give zeros, or leave an accumulated ``out`` as it
    is. Not differentiable, and outside autocast.

    Raises ConfigError where no backend can, LayoutError where operands and request do not fit.
    """
    _check(request, left, right, out=out, bias=bias)
    with torch.no_grad(), without_autocast(left):
        if out is None:
            out = left.new_empty(result_shape(request.product, left, right), dtype=request.output_dtype)
        backend = choose(request, wish=wish)
        if left.numel() and right.numel():
            if not kernels.in_memory(left, right, out) or (
                request.device_type == "cpu" and _inner(request, left) * out.numel() < _SMALL and _wish(wish) is None
            ):
                backend = cast(Backend, reference)
            return out, backend.run(request, left, right, out=out, bias=bias)
        if not request.accumulate:
            out.zero_()
        add_bias_(request, out, bias)
        return out, bias_sum(request, left)


def _inner(request: Request, left: torch.Tensor) -> int:
    return left.shape[0] if request.product is Product.WGRAD else left.shape[1]


def _check(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    A, B = oriented(request.product, left, right)
    given = {(tensor.dtype, tensor.device) for tensor in (left, right)}
    shape = result_shape(request.product, left, right)
    if A.shape[1] != B.shape[0] or given != {(request.operand_dtype, left.device)}:
        raise LayoutError(
            f"{request} got operands {list(left.shape)} {left.dtype} and {list(right.shape)} {right.dtype}; "
            f"give one dtype, one device and sizes that fit"
        )
    takes_bias = request.with_bias and request.product is Product.FORWARD
    if takes_bias and (bias is None or tuple(bias.shape) != shape[1:]):
        raise LayoutError(
            f"{request} got a bias {None if bias is None else list(bias.shape)}; give one of shape {list(shape[1:])}"
        )
    if out is not None and (tuple(out.shape), out.dtype, out.device) != (shape, request.output_dtype, left.device):
        raise LayoutError(
            f"{request} got an output {list(out.shape)} {out.dtype} on {out.device}; give {list(shape)} "
            f"{request.output_dtype} on {left.device}"
        )
    if out is not None and _shares_places(out):
        raise LayoutError(
            f"{request} got an output {list(out.shape)} with strides {list(out.stride())}, of which elements share "
            f"memory; give one whose elements have places of their own"
        )


def backends(device_type: str) -> tuple[Backend, ...]:
    """Return the backends of a device type in the order in which they are tried."""
    return _ORDER.get(device_type, _ELSEWHERE)


def table(device_type: str) -> list[tuple[str, str, str]]:
    """Return rows (backend, request, why not) of what this machine's backends say of bf16 operands into fp32."""
    rows = []
    for product in Product:
        for accumulate in (False, True) if product is Product.WGRAD else (False,):
            request = Request(
                product=product,
                device_type=device_type,
                operand_dtype=torch.bfloat16,
                output_dtype=torch.float32,
                accumulate=accumulate,
            )
            for backend in backends(device_type):
                rows.append((backend.NAME, str(request), backend.unsupported(request) or ""))
    return rows
