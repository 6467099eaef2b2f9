"""How our layers enter Megatron's distributed checkpoints: by a function that the integration of megatron-core gives.

Megatron takes a layer that has no ``sharded_state_dict`` for a replica, and would keep one rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_frozen.errors import ConfigError
from megatron_frozen.params import KeepsMarks

ShardedState = Callable[..., dict[str, Any]]

_GIVEN: list[ShardedState] = []


def give_sharded_state(function: ShardedState) -> None:
    """Let layers answer ``sharded_state_dict`` by ``function(layer, prefix=, sharded_offsets=, metadata=)``."""
    _GIVEN[:] = [function]


class SavesShards(KeepsMarks):
    """A layer whose marked parameters are shards in Megatron's distributed checkpoints."""

    has_extra_state = True
    """Megatron's layer of this name saves an empty ``_extra_state`` and asks for one."""
    may_be_padded = False
    """A shard may be loaded from a tensor of another size, as a vocabulary is padded for the number of ranks."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        """Return {key: ShardedTensor} as megatron-core's layer of this name does; ``metadata`` may be None.

        Raises ConfigError where megatron_frozen.integrations.megatron_core was not imported.
        """
        if not _GIVEN:
            raise ConfigError(
                "sharded_state_dict makes megatron-core's ShardedTensors, and its integration is not imported; "
                "import megatron_frozen.integrations.megatron_core first"
            )
        return _GIVEN[0](self, prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)
