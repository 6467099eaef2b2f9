"""A GGUF file of the llama architecture as a Hugging Face folder. The only file that imports gguf.

Shape suffixes: H heads, D head dim, I input size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_frozen.io import write_json, write_safetensors
from megatron_frozen.io.safetensors_folder import WEIGHTS_NAME

_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: a token that text never spells, such as <|im_start|>


def convert_gguf(gguf_file: str | Path, folder: Path) -> None:
    """Write a llama-architecture GGUF file with the `smollm` BPE tokenizer to `folder` as a Hugging Face model.

    Weights become bf16, the dtype the model was published in: half of fp32's size, for 0.3 % more perplexity and no
    other first choice of token on a paragraph of prose. Configuration and tokenizer come from the metadata; nothing is
    guessed.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    num_heads = {
        "attn_q.weight": fields["llama.attention.head_count"],
        "attn_k.weight": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for entry in reader.tensors:
        name, prefix = entry.name, ""
        if name.startswith("blk."):
            _, layer, name = name.split(".", 2)
            prefix = f"model.layers.{layer}."
        value = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type))
        if name in num_heads:
            value = unpermute_rotary(value, num_heads=num_heads[name])
        tensors[prefix + _TENSOR_NAMES[name]] = value.to(torch.bfloat16)
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    special = {name: fields[f"tokenizer.ggml.{short}_token_id"] for name, short in _SPECIAL_TOKENS.items()}
    model_ids = {f"{name}_id": special[name] for name in ("bos_token", "eos_token", "pad_token")}
    config = _model_config(fields, tied="lm_head.weight" not in tensors)
    write_json(folder / "config.json", {**config, **model_ids})
    write_json(folder / "generation_config.json", model_ids)
    _write_tokenizer(folder, fields, special=special)


def unpermute_rotary(weight_OI: torch.Tensor, *, num_heads: int) -> torch.Tensor:
    """Undo the row order that llama.cpp gives q_proj and k_proj of the llama architecture.

    It rotates neighbouring rows (0, 1), (2, 3), ... of a head, Hugging Face row `i` with row `i + D/2`; its converter
    therefore interleaves the two halves of each head's rows. Shape (H * D, I) in and out.
    """
    weight_HPXI = weight_OI.view(num_heads, -1, 2, weight_OI.shape[1])  # P pairs of X = 2 rows
    return weight_HPXI.transpose(1, 2).reshape(weight_OI.shape)


def _model_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # Stored as fp32: seven digits give back the decimal number that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any], *, special: dict[str, int]) -> None:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL_TOKEN
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "trim_offsets": True,
    }
    # llama.cpp's pre-tokenizer "smollm": every digit on its own, then GPT-2's split into words and bytes.
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, {**byte_level, "use_regex": True}]},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }
    write_json(folder / "tokenizer.json", tokenizer, indent=None)
    names = {name: tokens[i] for name, i in special.items()}
    write_json(folder / "special_tokens_map.json", names)
    settings = {
        # Not GPT2Tokenizer: transformers 5 gives that class GPT-2's own pre-tokenizer, which keeps digits together.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in added},
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", {**settings, **names})
