"""LoRA on megatron-core's GPTModel: one adapter per projection of its fused linears, and PEFT's files for them.

``lora`` knows no megatron-core and ``integrations`` no adapters, and neither may know the other; this joins them.
"""

from megatron_frozen.gpt_lora.apply import adapters_disabled as adapters_disabled
from megatron_frozen.gpt_lora.apply import apply_lora as apply_lora
from megatron_frozen.gpt_lora.apply import assert_adapters_learn as assert_adapters_learn
from megatron_frozen.gpt_lora.apply import lora_parameters as lora_parameters
from megatron_frozen.gpt_lora.apply import merge_adapter as merge_adapter
from megatron_frozen.gpt_lora.files import load_adapter as load_adapter
from megatron_frozen.gpt_lora.files import save_adapter as save_adapter
