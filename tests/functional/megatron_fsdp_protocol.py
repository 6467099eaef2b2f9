"""Megatron-FSDP's treatment of one weight's gradient, around the function of its own that decides it.

Its classes need CUDA. ``_grad_acc``, which runs after each backward, does not: it is cut out of megatron-core's source
and run here on stand-ins for what it reads. Attributes are set as ``all_gather_and_wait_parameters_ready`` does.
"""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# What the layers read or set, by the names of the source.
ATTRIBUTES = {
    "__fsdp_param__", "_gbuf", "_is_shared", "get_main_grad", "grad_added_to_main_grad", "is_data_distributed",
    "main_grad", "overwrite_main_grad",
}  # fmt: skip


def source_folder() -> Path:
    """Return the folder of Megatron-FSDP in the installed megatron-core, which is not imported."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "core" / "distributed" / "fsdp" / "src" / "megatron_fsdp"


def named_attributes() -> set[str]:
    """Return every attribute that the source names, plainly or in a string."""
    names: set[str] = set()
    for path in source_folder().glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def _upstream_grad_acc(wrapper: Any) -> Any:
    text = (source_folder() / "megatron_fsdp.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    (found,) = [node for node in nodes if node.name == "_grad_acc"]
    lines = text.splitlines()[found.lineno - 1 : found.end_lineno]
    scope: dict[str, Any] = {"self": wrapper, "to_local_if_dtensor": lambda tensor: tensor}
    exec(textwrap.dedent("\n".join(lines)), scope)
    return scope["_grad_acc"]


class FsdpWeight:
    """One weight under Megatron-FSDP on one rank.

    is_sharded: gradients are sharded (optim_grads, optim_grads_params): each backward fills a bucket of fresh memory,
    here NaN, which is reduced after it. Else (no_shard, optim) one buffer takes all micro-batches.
    """

    def __init__(self, weight: Any, *, is_sharded: bool, dtype: torch.dtype = torch.float32) -> None:
        self.weight, self.is_sharded = weight, is_sharded
        self.num_calls = 0
        self.total = torch.zeros(weight.shape)  # stands for the reduced shard
        self.bucket: torch.Tensor | None = None if is_sharded else torch.zeros(weight.shape, dtype=dtype)
        self.dtype = dtype
        gbuf = SimpleNamespace(is_data_distributed=is_sharded)
        group = SimpleNamespace(requires_grad=True, hsdp_gbuf=None, main_grad_buffer=gbuf)
        buffer = SimpleNamespace(param_to_param_group={weight: 0}, parameter_groups=[group])
        ddp_config = SimpleNamespace(fsdp_double_buffer=False)
        self._grad_acc = _upstream_grad_acc(SimpleNamespace(param_and_grad_buffer=buffer, ddp_config=ddp_config))
        weight._gbuf, weight.get_main_grad = gbuf, self._get_main_grad
        self.unshard()

    def _get_main_grad(self) -> torch.Tensor:
        self.num_calls += 1
        if self.bucket is None:
            self.bucket = torch.full(self.weight.shape, torch.nan, dtype=self.dtype)
        return self.bucket

    def unshard(self) -> None:
        """Set what is set before each forward and backward; releases set overwrite_main_grad for every strategy."""
        self.weight.grad_added_to_main_grad = False
        self.weight.__fsdp_param__ = True
        self.weight.overwrite_main_grad = True

    def after_backward(self) -> None:
        """Handle the gradient as upstream does, then reduce a bucket and free it."""
        self._grad_acc(self.weight)
        assert self.weight.grad is None
        assert self.weight.grad_added_to_main_grad is False
        if self.is_sharded:
            assert self.bucket is not None
            self.total += self.bucket
            self.bucket = None

    def gradient(self) -> torch.Tensor:
        """Return the sum of all micro-batches."""
        if self.is_sharded:
            return self.total
        assert self.bucket is not None
        return self.bucket
