"""Kernels in C++ for the CPU, as functions of tensors: products into fp32, causal attention, and ``passes``."""

from megatron_frozen.kernels.attention import attend as attend
from megatron_frozen.kernels.attention import attend_backward as attend_backward
from megatron_frozen.kernels.available import absent as absent
from megatron_frozen.kernels.call import has_operators as has_operators
from megatron_frozen.kernels.call import in_memory as in_memory
from megatron_frozen.kernels.call import is_recording as is_recording
from megatron_frozen.kernels.products import multiply_into as multiply_into
from megatron_frozen.kernels.torch_library import symbol as symbol
