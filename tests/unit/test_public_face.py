"""What can be imported from megatron_frozen, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import megatron_frozen

NAMES = {
    "CausalLM", "ColumnParallelLinear", "DecoderConfig", "LayerNormLinear", "Linear", "LinearWithFrozenWeight",
    "LoraConfig", "ModelParallelConfig", "RowParallelLinear", "VocabParallelEmbedding", "adapters_disabled",
    "apply_lora", "assert_adapters_learn", "clip_grad_norm", "copy_to_tensor_model_parallel_region",
    "destroy_model_parallel", "fold_leading", "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region", "get_data_parallel_group", "get_tensor_model_parallel_group",
    "initialize_model_parallel", "linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce",
    "load_adapter", "load_hf_folder", "merge_adapter", "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region", "save_adapter", "save_hf_folder",
    "scatter_to_sequence_parallel_region", "scatter_to_tensor_model_parallel_region", "sum_grads", "sum_partial_grads",
    "vocab_parallel_cross_entropy", "wgrad_into",
}  # fmt: skip


def test_the_names_are_pinned() -> None:
    found = {
        name
        for name, value in vars(megatron_frozen).items()
        if not name.startswith("_") and type(value).__name__ != "module" and name != "annotations"
    }
    assert found == NAMES


def test_every_public_name_is_documented() -> None:
    assert [name for name in sorted(NAMES) if not (getattr(megatron_frozen, name).__doc__ or "").strip()] == []


def test_importing_starts_nothing() -> None:
    """No process group, no logging set-up, no CUDA context, no change of torch's defaults."""
    code = (
        "import logging, torch; before = (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed());"
        "import megatron_frozen;"
        "after = (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed());"
        "assert before == after and not logging.getLogger().handlers;"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
