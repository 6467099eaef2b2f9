"""The dtype in which autograd keeps a parameter's gradient, which may be wider than the parameter's own."""

from __future__ import annotations

import torch


def kept_grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to give back a gradient for ``parameter``: its own, or a wider ``grad_dtype``.

    ``Tensor.grad_dtype`` came with torch 2.10 and belongs to leaves. Compiled code rounds to the parameter's dtype
    whatever it says (torch 2.13), so there it is not asked.
    """
    dtype = parameter.dtype
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return dtype
    wish = getattr(parameter, "grad_dtype", None)
    return dtype if wish is None or wish is dtype else torch.promote_types(dtype, wish)
