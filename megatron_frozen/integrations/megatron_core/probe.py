"""What an install of megatron-core does by itself, found by running it on a few numbers on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_frozen.diagnostics import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenFacts:
    """What upstream's frozen linear does with an X and a dY whose leading dims do not collapse by stride."""

    folds_forward: bool
    folds_dgrad: bool
    gives_bias_gradient: bool


def probe_frozen(function: Any, *, num_extras: int) -> FrozenFacts:
    """Run ``apply`` of upstream's class on one rank, with None for each argument that newer releases add.

    function: the autograd class; num_extras: how many those are. No collectives; random state stays untouched.
    """
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        input_, grad = (torch.ones(3, 4, size, device="cpu").transpose(0, 1) for size in (2, 5))
        weight, bias = torch.ones(5, 2, device="cpu"), torch.zeros(5, device="cpu")
        input_.requires_grad_()
        bias.requires_grad_()
        with Recorder() as forward:
            allreduce_dgrad, tp_group = False, None
            output = function.apply(input_, weight, bias, allreduce_dgrad, tp_group, *[None] * num_extras)
        with Recorder() as backward:
            output.backward(grad)
    return FrozenFacts(
        folds_forward=not forward.count("aten.bmm"),
        folds_dgrad=not backward.count("aten.bmm"),
        gives_bias_gradient=bias.grad is not None,
    )
