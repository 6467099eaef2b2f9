"""The demo model for real: fetched once into the user's cache, and a working chat model in transformers and in ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_frozen import io
from megatron_frozen.checkpoint.demo_model import fetch_demo_model
from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.layers import ModelParallelConfig

PROSE = (
    "The Roman Empire was the state that controlled the Mediterranean and much of Europe, Western Asia and "
    "North Africa. After the death of Caesar, a series of civil wars led to the rise of Augustus, who became "
    "the first emperor. For two centuries the empire enjoyed peace and prosperity, and its roads, laws and "
    "language spread across the continent."
)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_demo_model()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    assert not any(info.values()), info
    return model


def test_configuration_and_weights(folder):
    config = io.read_json(folder / "config.json")
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [config[name] for name in sizes] == [576, 30, 9, 3, 49152]
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000, 1e-5, True)
    files = io.SafetensorsFolder(folder)
    assert len(files.keys()) == 272
    assert {files.dtype(key) for key in files.keys()} == {"BF16"}  # noqa: SIM118 (no dict)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("In 1234, it's", ["In", "Ġ", "1", "2", "3", "4", ",", "Ġit", "'s"]),
        ("  def f(x):\n\treturn\n\n", ["Ġ", "Ġdef", "Ġf", "(", "x", "):", "Ċ", "ĉ", "return", "ĊĊ"]),
        ("<|im_start|>user\nHi<|im_end|>", ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]),
        ("<|im_start>", ["<", "|", "im", "_", "start", ">"]),
    ],
)
def test_tokens(tokenizer, text, tokens):
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "日本語 émoji 🤗 naïve\r\n\x00 ½ ٣ \u200b end "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_and_chat_template(tokenizer):
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 49152)
    assert tokenizer("Hi")["input_ids"] == tokenizer.convert_tokens_to_ids(["Hi"])  # nothing is put in front
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == CHAT
    assert tokenizer.decode(tokenizer(CHAT)["input_ids"], skip_special_tokens=True).startswith("system\nYou are")


def test_it_answers(model, tokenizer):
    prompt = tokenizer(CHAT, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def perplexity(model: Any, input_ids: torch.Tensor) -> float:
    with torch.no_grad():
        return model(input_ids, labels=input_ids).loss.exp().item()


def test_prose_is_likely_only_with_the_rows_of_q_and_k_in_order(model, tokenizer):
    """llama.cpp's row order leaves a model that is worse, not dead (perplexity 53, not 15): an answer proves little."""
    input_ids = tokenizer(PROSE, return_tensors="pt")["input_ids"]
    assert perplexity(model, input_ids) < 16
    projections = [p for layer in model.model.layers for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    in_order = [projection.weight.data for projection in projections]
    try:
        for projection, weight in zip(projections, in_order, strict=True):
            as_in_gguf = weight.view(-1, 2, 32, 576).transpose(1, 2)
            projection.weight.data = as_in_gguf.reshape(weight.shape)
        assert perplexity(model, input_ids) > 40
    finally:
        for projection, weight in zip(projections, in_order, strict=True):
            projection.weight.data = weight


def test_our_model_gives_the_same_logits(folder, model, tokenizer):
    ours = load_hf_folder(folder, parallel=ModelParallelConfig(params_dtype=torch.float32))
    input_ids = tokenizer(PROSE, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids), model(input_ids).logits, atol=1e-4, rtol=0)
