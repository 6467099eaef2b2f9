"""Looking at what a program really runs, its operations, copies and collectives, and at what it runs on."""

from megatron_frozen.diagnostics.diagnosis import Diagnosis as Diagnosis
from megatron_frozen.diagnostics.recorder import Recorder as Recorder
