"""Answers from a tensor-parallel model, one token after another.

Shapes: V vocabulary, S tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from megatron_frozen.comm import WORLD, all_gather, broadcast_, group_rank, group_size
from megatron_frozen.models import CausalLM
from megatron_frozen.train.sharding import is_cut


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
    on_token: Callable[[Sequence[int]], None] | None = None,
) -> list[int]:
    """The tokens after `prompt_ids`, up to and without one of `stop_ids`; every rank of the model returns the same.

    `temperature` 0 takes the likeliest token each time. `on_token` is given the answer so far as it grows. Collectives
    per token: those of the forward pass, an all-gather of the last position's logits, and a broadcast, so that all
    ranks go on with the first rank's choice. Where FSDP cut the model, all ranks of the job are ranks of the model.
    """
    ranks = WORLD if is_cut(model) else model.tp_group
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    answer: list[int] = []
    for _ in range(max_new_tokens):
        logits_V = _next_logits(model, [*prompt_ids, *answer], device=device)
        choice = torch.empty(1, dtype=torch.int64, device=device)
        if group_rank(ranks) == 0:
            choice.fill_(_choose(logits_V, temperature=temperature, generator=generator))
        token = int(broadcast_(choice, src=0, group=ranks))
        if token in stop_ids:
            break
        answer.append(token)
        if on_token is not None:
            on_token(answer)
    model.train(was_training)
    return answer


def _next_logits(model: CausalLM, token_ids: Sequence[int], *, device: torch.device) -> Tensor:
    """fp32 logits [V] of the token after `token_ids`, without the vocabulary's padding.

    Filler behind the last token makes the length divide for sequence parallelism; a causal model does not see it.
    """
    num_filler = -len(token_ids) % group_size(model.tp_group) if model.parallel.sequence_parallel else 0
    input_ids = torch.tensor([[*token_ids, *[0] * num_filler]], device=device)
    logits_shard_V = model(input_ids)[0, len(token_ids) - 1]
    logits_V, _ = all_gather(logits_shard_V, group=model.tp_group)
    return logits_V[: model.config.vocab_size].float()


def _choose(logits_V: Tensor, *, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits_V.argmax())
    # fp64, and the largest first made 0, so that the tiniest temperature gives -inf to the others and no NaN to it.
    below_max_V = (logits_V - logits_V.max()).double().cpu()
    return int(torch.multinomial(torch.softmax(below_max_V / temperature, dim=0), 1, generator=generator))
