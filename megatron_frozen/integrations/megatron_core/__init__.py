"""Megatron-core: a patch for its own layers, and layers of ours for its module specs.

Importing this package does not import megatron-core; using it does.
"""

from typing import Any

from megatron_frozen.integrations.megatron_core import upstream
from megatron_frozen.integrations.megatron_core.head import frozen_gpt_model_class
from megatron_frozen.integrations.megatron_core.head import use_frozen_head as use_frozen_head
from megatron_frozen.integrations.megatron_core.layers import frozen_class
from megatron_frozen.integrations.megatron_core.patching import PatchReport as PatchReport
from megatron_frozen.integrations.megatron_core.patching import is_patched as is_patched
from megatron_frozen.integrations.megatron_core.patching import patch as patch
from megatron_frozen.integrations.megatron_core.patching import patched as patched
from megatron_frozen.integrations.megatron_core.patching import unpatch as unpatch
from megatron_frozen.integrations.megatron_core.sharded_state import sharded_state as sharded_state
from megatron_frozen.integrations.megatron_core.specs import frozen_layer_spec as frozen_layer_spec
from megatron_frozen.integrations.megatron_core.specs import frozen_spec_provider_class

_SUBCLASSES = {
    "FrozenColumnParallelLinear": lambda: frozen_class(upstream.core("tensor_parallel.layers").ColumnParallelLinear),
    "FrozenGPTModel": frozen_gpt_model_class,
    "FrozenRowParallelLinear": lambda: frozen_class(upstream.core("tensor_parallel.layers").RowParallelLinear),
    "FrozenSpecProvider": frozen_spec_provider_class,
}
"""Subclasses of megatron-core's classes, made when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _SUBCLASSES:
        return _SUBCLASSES[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
