"""Whether torch's autocast would change a product's operands, and a product that it leaves alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_is_on(tensor: torch.Tensor) -> bool:
    """Return whether autocast is on for the device type of ``tensor``; some, as meta, have none.

    That is slow to tell, so whether it is on for any is asked first."""
    if not torch._C._is_any_autocast_enabled():
        return False
    device_type = tensor.device.type
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which products keep their operands' dtype; a backward may run inside a user's autocast."""
    return torch.autocast(tensor.device.type, enabled=False) if autocast_is_on(tensor) else nullcontext()
