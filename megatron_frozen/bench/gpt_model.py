"""A LoRA step of megatron-core's own GPTModel on the CPU, as installed and patched.

The loss is the caller's, on logits (``labels=None``), so their gradient comes as [b, s, V] and reaches the frozen head
as [s, b, V]. Every linear is megatron-core's and frozen; beside those of the decoder stand low-rank ones that train.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_frozen.bench.runner import BenchConfig, Row, bar_picture, stamp, telling, text_table, write_csv
from megatron_frozen.bench.targets import at_least, at_most, number
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.integrations.megatron_core import patched, upstream
from megatron_frozen.testing import relative_error

INSTALLED, PATCHED = "as installed", "patched"
COLUMNS = ("way", "forward_ms", "backward_ms", "backward_ratio", "batched_products", "loss")
_FASTER, _EQUAL = 20.0, 1e-5
_AS_NEAR = 1.02  # both round the same sums once; a single rounding that falls the other way moves what comes after it
_RANK = 8
_SLOW_REPEATS = 5  # of the way as installed, whose backward takes seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the model and its one sequence."""

    vocab: int = 32000
    seq: int = 128
    hidden: int = 512
    num_layers: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Times of one way in milliseconds, its batched products in one step, and what the step computed."""

    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    results: dict[str, Tensor] = field(default_factory=dict)
    """The loss under its name, and each trained parameter's gradient."""


def run(config: BenchConfig) -> None:
    """Measure, print the table with its targets, write gpt_model.csv and gpt_model.png.

    Raises ConfigError where megatron-core is absent or unknown to the patch."""
    sizes = Sizes(vocab=200, seq=16, hidden=32, num_layers=1) if config.small else Sizes()
    with _megatron_on_cpu():
        rows = measure(sizes, repeats=config.repeats)
        rows += verdicts(rows, sizes)
    times, targets = ([row for row in rows if row["kind"] == kind] for kind in ("time", "target"))
    tables = f"{text_table(times, COLUMNS)}\n\n{text_table(targets, ('figure', 'value', 'target', 'met'))}"
    path = config.output / "gpt_model.csv"
    mark = stamp(config) | {"megatron_core": upstream.version()}
    bars = {str(row["way"]): {name: number(row, f"{name}_ms") for name in ("forward", "backward")} for row in times}
    title = f"GPTModel, frozen, V={sizes.vocab}, s={sizes.seq}, bf16"
    with telling(tables, path=path):
        write_csv(path, [mark | row for row in rows])
        bar_picture(path.with_suffix(".png"), bars, title=title, label="ms")


def measure(sizes: Sizes, *, repeats: int) -> list[Row]:
    """Return a row for each way, in bf16, their steps in turn; one step of each comes before.

    The batched products of a step include those of attention, which are the same for both."""
    model = _model(sizes, dtype=torch.bfloat16)
    ways = {INSTALLED: Measured(), PATCHED: Measured()}
    batched = {}
    for way in ways:
        with _patch_for(way), Recorder() as seen:
            _step(model, sizes, Measured(), way=way)
        batched[way] = seen.count("aten.bmm")
    for index in range(repeats):
        for way, found in ways.items():
            if way == PATCHED or index < _SLOW_REPEATS:
                _step(model, sizes, found, way=way)
    backward = {way: statistics.median(found.backward_ms) for way, found in ways.items()}
    return [
        {
            "kind": "time",
            "vocab": sizes.vocab,
            "seq": sizes.seq,
            "hidden": sizes.hidden,
            "layers": sizes.num_layers,
            "way": way,
            "forward_ms": statistics.median(found.forward_ms),
            "backward_ms": backward[way],
            "backward_ratio": backward[way] / backward[PATCHED],
            "batched_products": batched[way],
            "loss": found.results["loss"].item(),
        }
        for way, found in ways.items()
    ]


def verdicts(times: list[Row], sizes: Sizes) -> list[Row]:
    """Return what has a target: the time of the backward, and how near the numbers are to upstream's and to fp64."""
    same = {"vocab": sizes.vocab, "seq": sizes.seq, "hidden": sizes.hidden, "layers": sizes.num_layers}
    installed = next(row for row in times if row["way"] == INSTALLED)
    exact = results(sizes, torch.float64, way=INSTALLED)
    fp32 = {way: results(sizes, torch.float32, way=way) for way in (INSTALLED, PATCHED)}
    bf16 = {
        way: statistics.mean(_distances(results(sizes, torch.bfloat16, way=way), exact)) for way in (INSTALLED, PATCHED)
    }
    apart, ratio = max(_distances(fp32[PATCHED], fp32[INSTALLED])), bf16[PATCHED] / bf16[INSTALLED]
    return [
        at_least("backward as installed over patched", number(installed, "backward_ratio"), limit=_FASTER, of=same),
        at_most("fp32 loss and gradients: largest relative distance of the two", apart, limit=_EQUAL, of=same),
        at_most("bf16: mean distance from fp64, patched over as installed", ratio, limit=_AS_NEAR, of=same),
    ]


def results(sizes: Sizes, dtype: torch.dtype, *, way: str) -> dict[str, Tensor]:
    """Return loss and gradients of one step in ``dtype``, of the numbers that bf16 parameters hold."""
    rounded, model = (_model(sizes, dtype=of) for of in (torch.bfloat16, dtype))
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), rounded.parameters(), strict=True):
            parameter.copy_(source)
    found = Measured()
    _step(model, sizes, found, way=way)
    return found.results


def _distances(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> list[float]:
    """Return the relative distance of the loss and of each gradient, each as a whole."""
    return [relative_error(found[name], of) for name, of in exact.items()]


def _step(model: nn.Module, sizes: Sizes, found: Measured, *, way: str) -> None:
    """Take one step without an optimizer, and note times, loss and gradients."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes.vocab, (1, sizes.seq + 1), generator=generator)
    positions = torch.arange(sizes.seq).expand(1, -1)
    mask = torch.ones(1, 1, sizes.seq, sizes.seq, dtype=torch.bool).triu(1)
    with _patch_for(way):
        start = time.perf_counter()
        logits = model(ids[:, :-1], positions, mask, labels=None)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = torch.nn.functional.cross_entropy(wide.flatten(0, 1), ids[0, 1:])
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
    found.forward_ms.append((middle - start) * 1e3)
    found.backward_ms.append((end - middle) * 1e3)
    found.results["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found.results[name], parameter.grad = parameter.grad, None


def _patch_for(way: str) -> contextlib.AbstractContextManager[object]:
    return patched() if way == PATCHED else contextlib.nullcontext()


def _model(sizes: Sizes, *, dtype: torch.dtype) -> Any:
    """Return a Llama-like GPTModel with adapters, the same for every call up to the rounding of its numbers."""
    config = llama_config(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=3 * sizes.hidden,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = upstream.core("models.gpt").GPTModel(
            config=config,
            transformer_layer_spec=upstream.core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
                normalization="RMSNorm"
            ),
            vocab_size=sizes.vocab,
            max_sequence_length=sizes.seq,
            position_embedding_type="rope",
        )
        model.requires_grad_(requires_grad=False)
        for layer in model.decoder.layers:
            for linear in (
                layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.mlp.linear_fc1,
                layer.mlp.linear_fc2,
            ):  # fmt: skip
                _add_adapter(linear)
    return model.to(dtype)


def llama_config(**options: Any) -> Any:
    """Return a TransformerConfig of a Llama-like model of four heads for the CPU; ``options`` count before the rest."""
    common = {
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # which is a default of its own
        return upstream.core("transformer").TransformerConfig(**(common | options))


def _add_adapter(linear: Any) -> None:
    """Put two trainable linears of megatron-core beside one of it, the second not zero, so that both learn."""
    column = upstream.core("tensor_parallel").ColumnParallelLinear
    options = {"config": linear.config, "init_method": partial(nn.init.normal_, std=0.02), "bias": False}
    linear.adapter_in = column(linear.input_size, _RANK, **options)
    linear.adapter_out = column(_RANK, linear.output_size, **options)

    def add(module: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
        low, _ = module.adapter_in(inputs[0])
        return outputs[0] + module.adapter_out(low)[0], outputs[1]

    linear.register_forward_hook(add)


class _NoTracker:
    """One stream of random numbers, the CPU's, where megatron-core asks for CUDA's trackers."""

    def is_initialized(self) -> bool:
        return False

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        assert not states, "states of trackers that there are none of"

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[str]:
        return contextlib.nullcontext(name)


@contextlib.contextmanager
def cuda_answered() -> Iterator[None]:
    """Within this context megatron-core's questions to CUDA, for its device and its trackers, get a CPU's answers."""
    tensor_parallel = upstream.core("tensor_parallel")
    places: list[tuple[Any, str, Any]] = [(torch.cuda, "current_device", lambda: "cpu")]
    for module in (tensor_parallel, tensor_parallel.random, tensor_parallel.layers):
        places.append((module, "get_cuda_rng_tracker", lambda *_, **__: _NoTracker()))
    before = [getattr(place, name) for place, name, _ in places]
    try:
        for place, name, value in places:
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(places, before, strict=True):
            setattr(place, name, value)


@contextlib.contextmanager
def _megatron_on_cpu() -> Iterator[None]:
    """Set up megatron-core's groups for this process alone."""
    parallel_state = upstream.core("parallel_state")
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    with cuda_answered():
        try:
            parallel_state.initialize_model_parallel()
            yield
        finally:
            parallel_state.destroy_model_parallel()
            if is_ours:
                dist.destroy_process_group()
