"""Checkpoints: Hugging Face folders into shards and back, merged adapters, the demo model, a job's own state."""

from megatron_frozen.checkpoint.demo_model import fetch_demo_model as fetch_demo_model
from megatron_frozen.checkpoint.hf_folder import load_hf_folder as load_hf_folder
from megatron_frozen.checkpoint.hf_folder import save_hf_folder as save_hf_folder
from megatron_frozen.checkpoint.merge import merge_adapter as merge_adapter
