"""The decoder layers by torch.compile, and whether it works on this machine, found out before anything is loaded."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from megatron_frozen.models import CausalLM


def unsupported() -> str | None:
    """Return why layers cannot be compiled here, as the end of a sentence; None if they can.

    A small function is compiled and run, as it takes more than a compiler: the headers of Python for one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(_plus_one, fullgraph=True)(torch.ones(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
        return f"torch.compile fails on this machine ({type(error).__name__}: {reason})"
    return None


def _plus_one(tensor: Tensor) -> Tensor:
    return tensor + 1


def compile_layers(model: CausalLM) -> None:
    """Compile the decoder layers of `model`, each when it is first run."""
    # Dynamo looks at .grad of a layer's input, of which torch warns.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    model.model.compile_layers()
