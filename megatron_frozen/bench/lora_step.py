"""A LoRA step on a real model: ours, its peers', full fine-tuning, and the products and attention that it cannot go
below.

Each way's AdamW is torch's fused one, as transformers has it by default. Left to choose, torch takes its loop of single
operations on a CPU, several times as slow, which would slow full fine-tuning most, in our favour. Column peak mib is
the highest resident size over the steps after the first, in which two ways compile, as that takes memory that no later
step needs; nan where the system does not count it from there.

Shape suffixes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import math
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen.autograd.causal_attention import CausalAttention, causal_attention_unsupported
from megatron_frozen.bench import hf_peers
from megatron_frozen.bench.runner import BenchConfig, Row, bar_picture, stamp, telling, text_table, write_csv
from megatron_frozen.bench.targets import at_least, at_most, number
from megatron_frozen.bench.workers import Build, Run, Step, take_turns
from megatron_frozen.checkpoint import load_hf_folder, save_hf_folder
from megatron_frozen.checkpoint.demo_model import fetch_demo_model
from megatron_frozen.errors import ConfigError
from megatron_frozen.gemm import peers
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import LoraConfig, apply_lora, load_adapter, save_adapter
from megatron_frozen.models import CausalLM, DecoderConfig
from megatron_frozen.train import compiling

SHAPE, SMALL_SHAPE = (20, 4, 512), (4, 2, 32)  # steps, batch, sequence
RANK, LEARNING_RATE = 16, 2e-4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_FEWER = 10  # steps of a way whose losses no target compares
NUM_WARM = 3  # steps that compile, and steps whose memory is not yet the system's
OURS, COMPILED, APART, FLOOR = "ours", "ours, compiled", "ours, projections apart", "floor"
PEFT, PEFT_BF16, PEFT_COMPILED, FULL = "peft", "peft, bf16 adapters", "peft, bf16, compiled", "full fine-tuning"
COLUMNS = ("way", "median_s", "samples", "tokens_per_s", "ratio_to_floor", "peak_mib", "first_loss", "last_loss",
           "loss_error")  # fmt: skip


def run(config: BenchConfig) -> None:
    """Measure, print the table with its targets, write lora_step.csv and lora_step.png.

    Raises ConfigError where torch.compile does not work."""
    if (why_not := compiling.unsupported()) is not None:
        raise ConfigError(f"lora-step compiles two of its ways, but {why_not}; install a C++ compiler")
    rows = measure(config)
    targets = verdicts({str(row["way"]): row for row in rows})
    tables = f"{text_table(rows, COLUMNS)}\n\n{text_table(targets, ('figure', 'value', 'target', 'met'))}"
    path, title = config.output / "lora_step.csv", "LoRA step, SmolLM2-135M, 4 x 512, r=16"
    seconds = {str(row["way"]): {"step": number(row, "median_s")} for row in rows}
    with telling(tables, path=path):
        write_csv(path, [stamp(config) | row for row in rows + targets])
        bar_picture(path.with_suffix(".png"), seconds, title=title, label="seconds a step")


def measure(config: BenchConfig) -> list[Row]:
    """Return a row for each way. All start from one adapter and see the same tokens."""
    num_steps, num_rows, seq_length = shape = SMALL_SHAPE if config.small else SHAPE
    with tempfile.TemporaryDirectory() as scratch:
        folder = _small_model(Path(scratch, "model")) if config.small else fetch_demo_model()
        ids = _small_ids(shape) if config.small else hf_peers.token_rows(folder, _text(), shape=shape)
        adapter = _first_adapter(folder, Path(scratch, "adapter"))
        fewer: dict[str, int] = dict.fromkeys((FLOOR, APART, FULL), min(NUM_FEWER, num_steps))
        runs = take_turns(_ways(folder, adapter, ids), num_steps=num_steps, fewer=fewer)
    num_warm = min(NUM_WARM, num_steps - 1)
    floor_s = runs[FLOOR].median("seconds", after=num_warm)
    return [_row(name, run, runs[PEFT], floor_s=floor_s, num_tokens=num_rows * seq_length, num_warm=num_warm)
            for name, run in runs.items()]  # fmt: skip


def _row(name: str, run: Run, peft: Run, *, floor_s: float, num_tokens: int, num_warm: int) -> Row:
    seconds = run.median("seconds", after=num_warm)
    # Those of the steps that both took: each way's first step sees the first tokens, in whatever round it comes.
    errors = [abs(ours - theirs) for ours, theirs in zip(run.all("loss"), peft.all("loss"), strict=False)]
    return {
        "kind": "time",
        "way": name,
        "median_s": seconds,
        "samples": len(run.figures) - num_warm,
        "tokens_per_s": num_tokens / seconds,
        "ratio_to_floor": seconds / floor_s,
        "peak_mib": run.peak_mib,
        "first_loss": run.all("loss")[0],
        "last_loss": run.all("loss")[-1],
        "loss_error": math.nan if name in (FLOOR, FULL) else max(errors),
    }


def _ways(folder: Path, adapter: Path, ids: Tensor) -> Mapping[str, Build]:
    common = {"folder": folder, "rows": ids, "learning_rate": LEARNING_RATE}
    ours = partial(our_step, **common, adapter=adapter)
    peft = partial(hf_peers.lora_step, **common, adapter=adapter)
    return {
        FLOOR: partial(floor_step, folder=folder, rows=ids),
        OURS: partial(ours, compiled=False, apart=False),
        COMPILED: partial(ours, compiled=True, apart=False),
        APART: partial(ours, compiled=False, apart=True),
        PEFT: partial(peft, fp32_adapters=True, compiled=False),
        PEFT_BF16: partial(peft, fp32_adapters=False, compiled=False),
        PEFT_COMPILED: partial(peft, fp32_adapters=False, compiled=True),
        FULL: partial(hf_peers.full_step, **common),
    }


def our_step(*, folder: Path, adapter: Path, rows: Tensor, learning_rate: float, compiled: bool, apart: bool) -> Step:
    """Return our step on a bf16 base with fp32 adapters. ``apart``: each projection is a product of its own."""
    model = load_hf_folder(folder, parallel=ModelParallelConfig(params_dtype=torch.bfloat16))
    load_adapter(model, adapter)
    model.train()
    if compiled:
        model.model.compile_layers()
    if apart:
        for layer in model.model.layers:
            for module in layer.modules():
                module.register_forward_hook(lambda *_: None)  # a hook wants its module called by itself
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate, fused=True)

    def step(index: int) -> dict[str, float]:
        ids = rows[index]
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        loss = model(ids, labels=labels).sum() / (labels != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": float(loss.detach())}

    return step


def floor_step(*, folder: Path, rows: Tensor) -> Step:
    """Return the bare products of frozen weights, forward and dX, and the quicker attention: no step can be shorter."""
    config = load_hf_folder(folder, parallel=ModelParallelConfig(params_dtype=torch.bfloat16)).config
    _, num_rows, seq_length = rows.shape
    num_tokens = num_rows * seq_length
    products = [
        tuple(torch.randn(*shape).bfloat16() for shape in ((num_tokens, size_in), (out, size_in), (num_tokens, out)))
        for out, size_in in _weight_shapes(config)
    ]
    head = products.pop()
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = (torch.randn(num_rows, n, seq_length, config.head_dim).bfloat16().requires_grad_() for n in heads)
    torchs = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    attention = torchs if causal_attention_unsupported(q, k, v) else CausalAttention.apply

    def step(_: int) -> dict[str, float]:
        for x, weight, grad in [*products * config.num_hidden_layers, head]:
            peers.bare(x, weight.t())
            peers.bare(grad, weight)
        for _ in range(config.num_hidden_layers):
            context = attention(q, k, v)
            context.backward(context.detach())
        return {"loss": math.nan}

    return step


def _weight_shapes(config: DecoderConfig) -> Iterator[tuple[int, int]]:
    """Yield [O, I] of one decoder layer's products, q|k|v and gate|up as one each, then the head's."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    yield (heads + 2 * config.num_key_value_heads) * config.head_dim, hidden
    yield hidden, heads * config.head_dim
    yield 2 * inner, hidden
    yield hidden, inner
    yield config.vocab_size, hidden


def verdicts(rows: Mapping[str, Row]) -> list[Row]:
    """Return the figures that have a target, beside it."""
    seconds = {way: number(row, "median_s") for way, row in rows.items()}
    peaks = {way: number(row, "peak_mib") for way, row in rows.items()}
    best = min((OURS, COMPILED), key=lambda way: seconds[way])
    fastest_peer_s = min(seconds[way] for way in (PEFT, PEFT_BF16, PEFT_COMPILED, FULL))
    loss_error, of = number(rows[best], "loss_error"), {"way": best}
    return [
        at_least("fastest peer's time over ours", fastest_peer_s / seconds[best], limit=1.5, of=of),
        at_least("peft's time over ours", seconds[PEFT] / seconds[best], limit=3.5, of=of),
        at_most("loss against peft's, largest difference", loss_error, limit=1e-2, of=of),
        at_most("peak memory over peft's", peaks[best] / peaks[PEFT], limit=0.6, of=of),
        at_most("peak memory over the compiled peer's", peaks[best] / peaks[PEFT_COMPILED], limit=1.0, of=of),
    ]


def _first_adapter(folder: Path, target: Path) -> Path:
    model = load_hf_folder(folder, parallel=ModelParallelConfig(params_dtype=torch.bfloat16))
    apply_lora(model, LoraConfig(r=RANK, alpha=2 * RANK, target_modules=TARGETS))
    save_adapter(model, target, base_model_name=str(folder))
    return target


def _text() -> str:
    """Real text on every machine: the standard library's sources, in the order of their names."""
    text, folder = "", Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 400_000:
            break
    return text


def _small_model(folder: Path) -> Path:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    parallel = ModelParallelConfig(params_dtype=torch.bfloat16)
    save_hf_folder(CausalLM(DecoderConfig.from_hf(config), parallel=parallel), folder)
    return folder


def _small_ids(shape: tuple[int, int, int]) -> Tensor:
    return torch.randint(128, shape, generator=torch.Generator().manual_seed(0))
