"""A tiny random Llama with a toy tokenizer and toy data, and whole training runs of it, for the tests of the job."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from megatron_frozen.checkpoint.hf_folder import save_hf_folder
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import LoraConfig
from megatron_frozen.models import CausalLM, DecoderConfig
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.job import train
from tests.unit.train_toy import toy_folder

# Heads divide by 2 and by 3; the vocabulary divides by neither, so it is padded.
SIZES = {
    "model_type": "llama",
    "vocab_size": 401,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
QUESTIONS = ["Hi there", "how are you?", "2+2=4", "the quick brown", "Answer: yes", "no"]
ANSWERS = ["Hi", "I am fine. yes", "yes", "fox user system", "no", "Hi there, how are you? I am fine."]


def toy_model(folder: Path, **sizes: Any) -> Path:
    """A Hugging Face folder with a seeded model whose weights are large enough for every part to matter."""
    torch.manual_seed(7)
    model = CausalLM(
        DecoderConfig.from_hf({**SIZES, **sizes}), parallel=ModelParallelConfig(use_cpu_initialization=True)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.1)
    save_hf_folder(model, folder)
    return toy_folder(folder)


def toy_rows(path: Path, *, count: int) -> Path:
    """`count` chats of one question and one answer, of very different lengths."""
    with path.open("w") as file:
        for index in range(count):
            question = {"role": "user", "content": f"{QUESTIONS[index % 6]} {index}"}
            answer = {"role": "assistant", "content": ANSWERS[index % 5]}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return path


def toy_config(folder: Path, **changes: Any) -> TrainConfig:
    """A short run in `folder`, whose model and data are made if they are not there yet."""
    if not (folder / "base").exists():
        toy_model(folder / "base")
        toy_rows(folder / "train.jsonl", count=12)
        toy_rows(folder / "eval.jsonl", count=5)
    config = TrainConfig(
        model=str(folder / "base"),
        output_dir=str(folder / "run"),
        train_data=str(folder / "train.jsonl"),
        eval_data=str(folder / "eval.jsonl"),
        max_steps=4,
        dtype="fp32",
        lora=LoraConfig(r=4, alpha=8),
        seq_length=64,
        packing=False,
        learning_rate=1e-2,
        distributed_timeout_s=60,
        sample_max_new_tokens=3,
    )
    return dataclasses.replace(config, **changes)


def run_config(rank: int, world_size: int, *configs: TrainConfig) -> None:
    """A body for `run_ranks`: the runs of `configs` one after the other."""
    for config in configs:
        train(config)


def run_own_config(rank: int, world_size: int, configs: list[TrainConfig]) -> str:
    """A body for `run_ranks`: each rank runs its own config, and returns the error that ended it."""
    try:
        train(configs[rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def losses(config: TrainConfig, *, kind: str = "train") -> list[float]:
    """The recorded losses of a run."""
    lines = Path(config.output_dir, "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == kind]


def checkpoint_bytes(config: TrainConfig, step: int) -> dict[str, bytes]:
    """The files of a checkpoint, less what names its own place."""
    folder = Path(config.output_dir, "checkpoints", f"step_{step:08d}")
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
