"""A tiny GGUF file as llama.cpp's converter writes it, turned back into the Hugging Face folder it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from megatron_frozen import io
from megatron_frozen.checkpoint.gguf_file import convert_gguf, unpermute_rotary
from tests.unit.models_reference import random_batch, tiny_model, weights_of

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "Ġ", "Ġa", "12", "ab"]
MERGES = ["Ġ a", "1 2", "a b"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def permute(weight: Tensor, *, num_heads: int) -> Tensor:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    for index, add in enumerate([writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id]):
        add(index)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)  # noqa: FBT003 (gguf's signature)
    writer.add_add_space_prefix(False)  # noqa: FBT003 (gguf's signature)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in weights_of(model).items():
        path_in_layer = name.removesuffix(".weight")
        prefix = ""
        if name.startswith("model.layers."):
            _, _, layer, path_in_layer = path_in_layer.split(".", 3)
            prefix = f"blk.{layer}."
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(NAMES[path_in_layer])
        array = (permute(value, num_heads=heads) if heads else value).numpy()
        kind = gguf.GGMLQuantizationType.F32 if value.dim() == 1 else gguf.GGMLQuantizationType.Q8_0
        data = gguf.quants.quantize(array, kind)
        writer.add_tensor(f"{prefix}{NAMES[path_in_layer]}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_comes_back(tmp_path, tied):
    """Within the error of Q8_0 and bf16, its logits in transformers too; the rows of q and k in their order."""
    model = tiny_model("llama", tie_word_embeddings=tied, intermediate_size=64)
    write_gguf(tmp_path / "x.gguf", model)
    (tmp_path / "hf").mkdir()
    convert_gguf(tmp_path / "x.gguf", tmp_path / "hf")
    saved, expected = io.read_safetensors(tmp_path / "hf" / "model.safetensors"), weights_of(model)
    assert saved.keys() == expected.keys()
    for key, weight in expected.items():
        assert saved[key].dtype == torch.bfloat16
        torch.testing.assert_close(saved[key].float(), weight, atol=5e-3, rtol=2**-8)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    input_ids, _ = random_batch()
    with torch.no_grad():
        logits, reference = again(input_ids).logits, model(input_ids).logits
    assert (logits - reference).norm() < 0.05 * reference.norm()
    for name in ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "max_position_embeddings", "head_dim"):
        assert getattr(again.config, name) == getattr(model.config, name), name
    assert (again.config.bos_token_id, again.generation_config.eos_token_id) == (1, 2)


def test_a_tokenizer_comes_back(tmp_path):
    write_gguf(tmp_path / "x.gguf", tiny_model("llama", intermediate_size=64))
    (tmp_path / "hf").mkdir()
    convert_gguf(tmp_path / "x.gguf", tmp_path / "hf")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    # Digits stay apart, merge or not; a special token is one, and its text is no other token's.
    assert tokenizer.tokenize("ab a12<|im_end|>") == ["ab", "Ġa", "1", "2", "<|im_end|>"]
    assert tokenizer.all_special_tokens == ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_unpermute_is_the_inverse_of_llama_cpp_s_permute():
    weight = torch.arange(2 * 6 * 3).view(12, 3)  # 2 heads of 6 rows
    written = permute(weight, num_heads=2)
    assert written[:6, 0].tolist() == [0, 9, 3, 12, 6, 15]
    assert torch.equal(unpermute_rotary(written, num_heads=2), weight)
