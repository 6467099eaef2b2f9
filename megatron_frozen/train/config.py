"""The configuration of a training run: a YAML file and `key=value` overrides, checked before anything else happens."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_frozen.environment import DGRAD_ALLREDUCE_FP32, LINEAR_DGRAD_FP32, switch
from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations import fsdp
from megatron_frozen.io import read_json
from megatron_frozen.lora import LoraConfig
from megatron_frozen.models import DecoderConfig, check_tensor_parallel
from megatron_frozen.train import compiling
from megatron_frozen.train.schema import build
from megatron_frozen.train.yaml_file import parse_yaml, read_yaml

DEMO_MODEL = "demo"
_LIBRARIES = ("tokenizers", "jinja2", "tqdm", "tensorboard", "matplotlib")

_AT_LEAST = {
    "tensor_model_parallel_size": 1, "seq_length": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
    "max_steps": 1, "warmup_steps": 0, "eval_every": 0, "save_every": 0, "log_every": 1, "keep_checkpoints": 1,
    "seed": 0, "distributed_timeout_s": 1, "sample_max_new_tokens": 0, "learning_rate": 0.0, "weight_decay": 0.0,
    "adam_epsilon": 0.0, "max_grad_norm": 0.0, "min_learning_rate_ratio": 0.0, "adam_beta1": 0.0, "adam_beta2": 0.0,
}  # fmt: skip
_BELOW = {
    "adam_beta1": 1.0, "adam_beta2": 1.0, "learning_rate": math.inf, "weight_decay": math.inf,
    "adam_epsilon": math.inf, "seed": 2**40, "distributed_timeout_s": 10**8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything a run depends on."""

    model: str
    """A Hugging Face checkpoint folder, or `demo` for the model that `fetch-demo-model` keeps in the cache."""
    output_dir: str
    """The folder of this run: checkpoints, metrics, loss curve and the final adapter. One run per folder."""
    train_data: str
    """A JSONL file: chat (`messages`), `prompt`/`completion` or `text` rows."""
    max_steps: int
    """Optimizer steps in all, counted from the very first one also after a resume."""
    eval_data: str | None = None
    """A JSONL file of held-out rows; null = no evaluation."""
    tensor_model_parallel_size: int = 1
    """Ranks that share one copy of the model; the other ranks are data parallel."""
    sequence_parallel: bool = False
    """Split the activations between the linear layers over the sequence; needs tensor parallelism above 1."""
    fsdp: bool = False
    """Cut the weights over the data-parallel ranks and gather them layer by layer, by PyTorch's FSDP2."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype. Frozen weights are kept in it; trained ones stay fp32 and are cast for each product."""
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """The adapters; null = full fine-tuning."""
    seq_length: int = 512
    """Tokens per row; a longer example is cut."""
    packing: bool = True
    """Put several short examples into one row. They do not see each other."""
    on_bad_line: Literal["error", "skip"] = "error"
    """What a broken line of a data file does."""
    micro_batch_size: int = 1
    """Rows per forward pass and rank."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step and rank."""
    learning_rate: float = 2e-4
    """The highest learning rate, reached after the warm-up."""
    min_learning_rate_ratio: float = 0.0
    """Where the cosine ends, as a fraction of learning_rate."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    weight_decay: float = 0.0
    """AdamW's decoupled decay, on matrices only."""
    adam_beta1: float = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: float = 0.999
    """AdamW's decay of the second moment."""
    adam_epsilon: float = 1e-8
    """AdamW's denominator offset."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; null = never."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass to save memory."""
    compile: bool = False
    """Compile the decoder layers by torch.compile, which takes a while at the first steps and needs a C++ compiler."""
    eval_every: int = 0
    """Steps between evaluations; 0 = only before the first step and after the last."""
    save_every: int = 0
    """Steps between checkpoints; 0 = only after the last step."""
    log_every: int = 1
    """Steps between metric records."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay on disk."""
    resume: str = "auto"
    """`auto` = go on from the newest complete checkpoint in output_dir, `never`, or a checkpoint folder."""
    seed: int = 0
    """Seed of the adapters, the order of the rows and dropout."""
    distributed_timeout_s: int = 600
    """Seconds after which a rank that waits for another one gives up."""
    sample_prompt: str | None = None
    """A question answered before and after training; null = the first held-out row."""
    sample_max_new_tokens: int = 64
    """Length limit of that answer; 0 = no sample."""

    def __post_init__(self) -> None:
        for name, lowest in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= lowest:
                raise ConfigError(f"the config key '{name}' is {value}; give {lowest} or more")
        for name, bound in _BELOW.items():
            if not getattr(self, name) < bound:
                raise ConfigError(f"the config key '{name}' is {getattr(self, name)}; give a number below {bound}")
        if self.min_learning_rate_ratio > 1.0:
            raise ConfigError(
                f"the config key 'min_learning_rate_ratio' is {self.min_learning_rate_ratio}; give a number from 0 to 1"
            )
        if self.adam_epsilon == 0.0:
            raise ConfigError(
                "the config key 'adam_epsilon' is 0, which makes 0 / 0 of a gradient that is zero; give 1e-8"
            )
        if self.max_grad_norm == 0.0:
            raise ConfigError("the config key 'max_grad_norm' is 0, which stops all learning; null means no clipping")
        if self.compile and self.fsdp:
            raise ConfigError(
                "compile and fsdp are both true, but FSDP2 gathers weights in hooks that a compiled layer leaves out; "
                "set one of them to false"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel is true with tensor_model_parallel_size 1; it needs at least 2 tensor-parallel ranks"
            )
        if self.sequence_parallel and self.seq_length % self.tensor_model_parallel_size:
            raise ConfigError(
                f"seq_length {self.seq_length} does not divide by tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size}, which sequence_parallel needs; change one of them"
            )


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read `path`, apply `key=value` overrides (dotted for nested keys: `lora.r=8`) and check everything."""
    values = read_yaml(path)
    for override in overrides:
        _apply_override(values, override)
    return build(TrainConfig, values)


def check_inputs(config: TrainConfig) -> None:
    """ConfigError if a file that the config names is not there or cannot be used, or a switch of the environment is
    neither on nor off. Reads no data and no weight."""
    for library in _LIBRARIES:  # some are needed at the very end only, which is no time to find out
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"training needs {library}, which is not installed; pip install 'megatron-frozen[train]'")
    for name in (LINEAR_DGRAD_FP32, DGRAD_ALLREDUCE_FP32):
        switch(name)  # read in the first backward pass
    if config.fsdp and (why_not := fsdp.unsupported()) is not None:
        raise ConfigError(f"fsdp is true, but {why_not}; or set fsdp=false")
    if config.compile and (why_not := compiling.unsupported()) is not None:
        raise ConfigError(f"compile is true, but {why_not}; install a C++ compiler, or set compile=false")
    for name in ("train_data", "eval_data"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: there is no file {path}; give the path of a JSONL file")
    check_model_folder(config.model, tensor_model_parallel_size=config.tensor_model_parallel_size)
    output = Path(config.output_dir)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output_dir: {output} is a file; give a folder")


def check_model_folder(model: str, *, tensor_model_parallel_size: int) -> None:
    """ConfigError if `model` is no checkpoint folder, or its config.json shows that it cannot run. Reads no weight.

    The demo model may still have to be fetched: it is checked when it is loaded.
    """
    if model == DEMO_MODEL:
        return
    if not Path(model, "config.json").is_file():
        raise ConfigError(
            f"model: {model} is no Hugging Face checkpoint folder (it has no config.json); "
            f"give such a folder, or '{DEMO_MODEL}'"
        )
    decoder = DecoderConfig.from_hf(read_json(Path(model, "config.json")))
    check_tensor_parallel(decoder, tensor_model_parallel_size)


def check_world(config: TrainConfig, *, world_size: int) -> None:
    """ConfigError if the ranks that were started do not divide into tensor-parallel groups."""
    size = config.tensor_model_parallel_size
    if world_size % size:
        raise ConfigError(
            f"{world_size} rank(s) were started for tensor_model_parallel_size {size}; "
            f"start a multiple of {size}, as in torchrun --nproc-per-node {size}"
        )


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"the override '{override}' is not of the form key=value, as in max_steps=10 or lora.r=8")
    *outer, last = key.split(".")
    for name in outer:
        inner = values.get(name)
        values[name] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        values = inner
    values[last] = parse_yaml(text, source=f"the override '{override}'")
