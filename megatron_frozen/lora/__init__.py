"""LoRA on tensor-parallel linears, with no activation collective of its own, and its files in PEFT's format."""

from megatron_frozen.lora.apply import adapter_names as adapter_names
from megatron_frozen.lora.apply import adapters_disabled as adapters_disabled
from megatron_frozen.lora.apply import apply_lora as apply_lora
from megatron_frozen.lora.apply import lora_parameters as lora_parameters
from megatron_frozen.lora.apply import named_lora_layers as named_lora_layers
from megatron_frozen.lora.apply import reset_adapter as reset_adapter
from megatron_frozen.lora.apply import set_active_adapter as set_active_adapter
from megatron_frozen.lora.config import LoraConfig as LoraConfig
from megatron_frozen.lora.guard import assert_adapters_learn as assert_adapters_learn
from megatron_frozen.lora.guard import require_input_grads as require_input_grads
from megatron_frozen.lora.layer import LoraLinear as LoraLinear
from megatron_frozen.lora.layer import adapter_delta as adapter_delta
from megatron_frozen.lora.peft_files import load_adapter as load_adapter
from megatron_frozen.lora.peft_files import save_adapter as save_adapter
