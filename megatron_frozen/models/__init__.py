"""A small decoder for Llama, Mistral, Qwen2 and Qwen3 checkpoints, built from the tensor-parallel layers."""

from megatron_frozen.models.causal_lm import CausalLM as CausalLM
from megatron_frozen.models.config import DecoderConfig as DecoderConfig
from megatron_frozen.models.config import check_tensor_parallel as check_tensor_parallel
from megatron_frozen.models.rope_config import RopeConfig as RopeConfig
