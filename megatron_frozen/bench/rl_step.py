"""A step of reinforcement learning on a decoder with a large vocabulary: the loss is the caller's, on the logits.

That is where an unfolded backward hurts most: the logits' gradient comes as [b, s, V] and reaches the frozen head as
[s, b, V], where the head's dX becomes a product for each token.

On a CPU torch copies W for each of them, 272 MB. One token in 64 is multiplied so, the rest at once, and the step's
time is raised by what the rest would have taken more (column reckoned s): each token takes as long as any other. That
is in favour of the unfolded way: all 512 at once would ask for 139 GB, and torch, refused them, goes through the tokens
in a loop of its own that takes longer still.

AdamW is fused and column peak mib leaves out the first step, see `lora_step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen.bench.runner import BenchConfig, Row, bar_picture, stamp, telling, text_table, write_csv
from megatron_frozen.bench.targets import at_most, number
from megatron_frozen.bench.workers import Build, Run, Step, take_turns
from megatron_frozen.functional import vocab_parallel_cross_entropy
from megatron_frozen.gemm import peers
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.lora import LoraConfig, apply_lora
from megatron_frozen.models import CausalLM, DecoderConfig

QWEN_HALF_BILLION = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
SMALL = QWEN_HALF_BILLION | {
    "hidden_size": 28,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "vocab_size": 300,
}
NUM_STEPS, NUM_WARM = 6, 2
SEQ_LENGTH, RANK, LEARNING_RATE, CLIP = 512, 16, 1e-5, 0.2
PARTS = 64
FULL, UNFOLDED, FLATTENED, OURS = "full fine-tuning", "lora, unfolded", "lora, plain flatten", "lora, ours"
TIMES = ("forward_backward_s", "step_s", "reckoned_s")
COLUMNS = ("way", *TIMES, "samples", "ratio_to_full", "step_ratio_to_full",
           "peak_mib", "first_loss", "grad_norm")  # fmt: skip

Product = Callable[[Tensor, Tensor], Tensor]
"""From [..., K] and [K, N] to [..., N]."""


def run(config: BenchConfig) -> None:
    """Measure, print the table with its targets, write rl_step.csv and rl_step.png."""
    rows = measure(config)
    targets = verdicts({str(row["way"]): row for row in rows})
    tables = f"{text_table(rows, COLUMNS)}\n\n{text_table(targets, ('figure', 'value', 'target', 'met'))}"
    path = config.output / "rl_step.csv"
    seconds = {
        str(row["way"]): {"forward + backward": number(row, "forward_backward_s"), "step": number(row, "step_s")}
        for row in rows
    }
    with telling(tables, path=path):
        write_csv(path, [stamp(config) | row for row in rows + targets])
        bar_picture(path.with_suffix(".png"), seconds, title="RL step, Qwen2.5-0.5B shape, s=512", label="s")


def measure(config: BenchConfig) -> list[Row]:
    """Return a row for each way. All have the same weights, tokens and loss."""
    model = SMALL if config.small else QWEN_HALF_BILLION
    ways: Mapping[str, Build] = {
        FULL: partial(step_of, model, product=None, full=True),
        UNFOLDED: partial(step_of, model, product=UnfoldedInPart(), full=False),
        FLATTENED: partial(step_of, model, product=peers.flattened, full=False),
        OURS: partial(step_of, model, product=None, full=False),
    }
    return rows_of(take_turns(ways, num_steps=NUM_STEPS))


def rows_of(runs: Mapping[str, Run]) -> list[Row]:
    """Return a row for each way, full fine-tuning first, of what their steps came to."""
    rows: list[Row] = [
        {
            "kind": "time",
            "way": name,
            **{figure: found.median(figure, after=NUM_WARM) for figure in TIMES},
            "samples": len(found.figures) - NUM_WARM,
            "peak_mib": found.peak_mib,
            "first_loss": found.all("loss")[0],
            "grad_norm": found.figures[0]["grad_norm"],
        }
        for name, found in runs.items()
    ]
    for row in rows:
        for ratio, figure in (("ratio_to_full", "forward_backward_s"), ("step_ratio_to_full", "step_s")):
            row[ratio] = number(row, figure) / number(rows[0], figure)
    return rows


def step_of(model_config: Mapping[str, Any], *, product: Product | None, full: bool) -> Step:
    """Return a step in bf16 with AdamW, on adapters or, ``full``, on all weights; its times hold what is reckoned.

    product: how frozen linears multiply, None for ours.
    """
    model = _model(model_config, product=product, full=full)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    ids = torch.randint(model.config.vocab_size, (1, SEQ_LENGTH), generator=torch.Generator().manual_seed(1))
    advantage = torch.randn(1, SEQ_LENGTH - 1, generator=torch.Generator().manual_seed(2))

    def step(index: int) -> dict[str, float]:
        start = time.perf_counter()
        loss = _policy_loss(model(ids), ids=ids, advantage=advantage)
        loss.backward()
        middle = time.perf_counter()
        norm = {"grad_norm": _grad_norm(trained)} if index == 0 else {}  # no later step may be timed with it
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        reckoned_s = product.take_reckoned_s() if isinstance(product, UnfoldedInPart) else 0.0
        return norm | {
            "loss": float(loss.detach()),
            "forward_backward_s": middle - start + reckoned_s,
            "step_s": end - start + reckoned_s,
            "reckoned_s": reckoned_s,
        }

    return step


def _model(model_config: Mapping[str, Any], *, product: Product | None, full: bool) -> CausalLM:
    torch.manual_seed(0)
    parallel = ModelParallelConfig(params_dtype=torch.bfloat16)
    model = CausalLM(DecoderConfig.from_hf(model_config), parallel=parallel)
    if not full:
        apply_lora(model, LoraConfig(r=RANK, alpha=2 * RANK))
    if product is not None:
        _multiply_by(model, product)
    return model


def _grad_norm(parameters: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def _policy_loss(logits: Tensor, *, ids: Tensor, advantage: Tensor) -> Tensor:
    """Return PPO's clipped loss of logits [b, s, V]; the old policy is the present one, so its ratio begins at 1.

    Log-probabilities as Megatron's users take them, from the cross-entropy over a vocabulary that ranks share: few
    passes over logits that are most of the step's memory. The last token predicts nothing.
    """
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    log_probs = -vocab_parallel_cross_entropy(logits, targets)[:, :-1]
    ratio = (log_probs - log_probs.detach()).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


class UnfoldedInPart:
    """A matmul of [s, b, K] and [K, N] that multiplies one in ``PARTS`` tokens as it comes, where it would take each
    token by itself, and all others at once."""

    def __init__(self) -> None:
        """Nothing is reckoned yet."""
        self.reckoned_s = 0.0
        """What the others would have taken more by themselves, of all calls since it was last taken."""

    def take_reckoned_s(self) -> float:
        """Return ``reckoned_s``, which begins anew."""
        taken_s, self.reckoned_s = self.reckoned_s, 0.0
        return taken_s

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the whole product."""
        if left.stride(0) == left.stride(1) * left.shape[1]:  # the rule by which matmul folds it, also at b = 1
            return peers.batched(left, right)
        num_first = max(left.shape[0] // PARTS, 1)
        start = time.perf_counter()
        first = peers.batched(left[:num_first], right)
        middle = time.perf_counter()
        rest = peers.flattened(left[num_first:], right)
        others_s = (middle - start) * rest.shape[0] / num_first
        self.reckoned_s += others_s - (time.perf_counter() - middle)
        return torch.cat((first, rest))


class _FrozenProduct(torch.autograd.Function):
    """Y = X W^T as a system without our fold has it.

    Shapes: X [..., I], W [O, I], Y [..., O].
    Forward: X and W^T by the given product.
    Dgrad: dY and W by the given product.
    Wgrad: none.
    Dbias: none.
    Collectives: none.
    Saved: W.
    Why: the comparison; everything else of the step is ours.
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.product = product
        return product(input_, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return ctx.product(grads[0], weight), None, None


class _Column(ColumnParallelLinear):
    """A base that LoraLinear takes with a product of its own."""

    product: Product

    def multiply(self, input_parallel: Tensor) -> Tensor:
        return _FrozenProduct.apply(input_parallel, self.weight, self.product)

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        output = _FrozenProduct.apply(input_, self._chosen_weight(weight), self.product)
        return self.leave_parallel(output)


class _Row(RowParallelLinear):
    """The same."""

    product: Product

    def multiply(self, input_parallel: Tensor) -> Tensor:
        return _FrozenProduct.apply(input_parallel, self.weight, self.product)


def _multiply_by(model: CausalLM, product: Product) -> None:
    swaps: dict[type, type] = {ColumnParallelLinear: _Column, RowParallelLinear: _Row}
    module: Any
    for module in model.modules():
        if type(module) in swaps:
            module.__class__, module.product = swaps[type(module)], product


def verdicts(rows: Mapping[str, Row]) -> list[Row]:
    """Return the figures that have a target, beside it."""
    ours, of = rows[OURS], {"way": OURS}
    return [
        at_most("forward + backward over full fine-tuning's", number(ours, "ratio_to_full"), limit=0.75, of=of),
        at_most("step over full fine-tuning's", number(ours, "step_ratio_to_full"), limit=0.60, of=of),
    ]
