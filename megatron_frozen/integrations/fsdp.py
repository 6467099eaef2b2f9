"""PyTorch FSDP2 (``fully_shard``): weight gradients in fp32 from bf16 products to the sharded parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from megatron_frozen.errors import ConfigError

_NEEDS = "grad_dtype"  # of torch.Tensor; public since torch 2.10

Place = tuple[nn.Module, str]
"""The module that holds a parameter, and the parameter's name in it."""


def unsupported() -> str | None:
    """Return why gradients cannot be kept in fp32 with this torch, as the end of a sentence; None if they can."""
    if hasattr(torch.Tensor, _NEEDS):
        return None
    return f"torch {torch.__version__} lacks Tensor.grad_dtype; install torch 2.10 or later"


class Fp32Grads:
    """What ``fp32_grads`` set up; ``remove()`` undoes it."""

    def __init__(self, groups: Iterable[_Group]) -> None:
        self._groups = tuple(groups)

    def remove(self) -> None:
        """Give the gradients of these groups the compute dtype again. Call it where no backward is half done."""
        for group in self._groups:
            group.remove()


class _Group:
    """The parameters that one FSDP module gathers, and the hook that looks at them before its forward."""

    def __init__(self, module: FSDPModule, places: list[Place]) -> None:
        assert isinstance(module, nn.Module)
        self._places = places
        # FSDP's own hook was put in front of all others, so the parameters are gathered by now.
        self._hook: RemovableHandle = module.register_forward_pre_hook(self._before_forward)
        self._changed: list[torch.Tensor] = []

    def _before_forward(self, module: nn.Module, _: object) -> None:
        _refuse_compiled([module, *(owner for owner, _ in self._places)])
        for owner, name in self._places:
            param = owner.get_parameter(name)
            if param.requires_grad and param.grad_dtype != torch.float32:
                param.grad_dtype = torch.float32
                self._changed.append(param)

    def remove(self) -> None:
        self._hook.remove()
        for param in self._changed:
            param.grad_dtype = param.dtype
        self._changed.clear()


# FSDP modules that have the hook, so that a second call adds none.
_GROUPS: WeakKeyDictionary[nn.Module, _Group] = WeakKeyDictionary()


def fp32_grads(module: nn.Module) -> Fp32Grads:
    """Keep the gradients of all FSDP2 groups in ``module`` in fp32 from the product on; the returned handle undoes it.

    For fp32 parameters computed with in bf16 or fp16: ``fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=
    torch.bfloat16, reduce_dtype=torch.float32))``. Without it each micro-batch's weight gradient is rounded to bf16
    before it is reduced. With it the linear layers of this package multiply the bf16 operands straight into fp32, and
    what any other operation returns is widened, since FSDP2 reduces a group in one dtype only. The gathered gradients
    of a group take twice the memory for the time of its backward. Parameters that train later than now are covered,
    those that are ignored by FSDP are left alone. A second call changes nothing. No collectives.

    It works by ``Tensor.grad_dtype``, which torch.compile does not honour: compiled code rounds to bf16 first.

    Raises ConfigError where torch is older than 2.10, no part of ``module`` was given to ``fully_shard``, a trainable
    parameter is itself bf16 or fp16 (FSDP2 rounds its gradient in the end, so nothing is gained), or a part of
    ``module`` is compiled; the last at a forward too.
    """
    if (why_not := unsupported()) is not None:
        raise ConfigError(f"fp32_grads cannot widen gradients: {why_not}")
    roots = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not roots:
        raise ConfigError(
            f"fp32_grads was given a {type(module).__name__} of which no part is sharded; call fully_shard on it first"
        )
    _refuse_compiled(module.modules())
    for part in roots:
        part.reshard()
    places = {part: list(_places(part)) for part in roots}
    _refuse_narrow(places.values())
    for part, own in places.items():
        if part not in _GROUPS:
            _GROUPS[part] = _Group(part, own)
    return Fp32Grads(_GROUPS[part] for part in roots)


def _places(root: FSDPModule) -> Iterator[Place]:
    """Yield the places of the sharded parameters that ``root`` gathers: those of no FSDP module within it."""
    assert isinstance(root, nn.Module)
    waiting: list[nn.Module] = [root]
    while waiting:
        module = waiting.pop()
        yield from ((module, name) for name, param in module.named_parameters(recurse=False) if _is_managed(param))
        waiting += [child for child in module.children() if not isinstance(child, FSDPModule)]


def _is_managed(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor)


def _refuse_narrow(groups: Iterable[list[Place]]) -> None:
    for owner, name in (place for places in groups for place in places):
        param = owner.get_parameter(name)
        if param.requires_grad and param.dtype.itemsize < torch.float32.itemsize:
            raise ConfigError(
                f"fp32_grads was given a trainable {param.dtype} parameter ({type(owner).__name__}.{name}), whose "
                f"gradient FSDP2 rounds to that dtype in the end; shard fp32 parameters and let MixedPrecisionPolicy "
                f"cast them for the products"
            )


def _refuse_compiled(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        # What torch.compile(module) wraps around it, and what module.compile() leaves in it.
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ConfigError(
                f"fp32_grads was given a compiled {type(module).__name__}, whose fp32 gradients torch.compile rounds "
                f"to the compute dtype; leave torch.compile or fp32_grads out"
            )
