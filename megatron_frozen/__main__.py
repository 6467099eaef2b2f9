"""`python -m megatron_frozen`: the command line."""

from __future__ import annotations

from megatron_frozen.cli import console_main

if __name__ == "__main__":
    console_main()
