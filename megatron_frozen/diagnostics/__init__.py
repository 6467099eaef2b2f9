"""Looking at what a program really runs: recorded operations, copies and collectives."""

from megatron_frozen.diagnostics.recorder import Recorder as Recorder
