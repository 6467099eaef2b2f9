"""A decoder with its output layer: token ids in, logits or per-token losses out.

Shape suffixes: [s] sequence, [b] batch, [h] hidden, [V] padded vocabulary, tp = tensor-parallel ranks, R = rows of a
fold.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_frozen.comm import Group, chosen_group, group_rank, group_size
from megatron_frozen.errors import LayoutError
from megatron_frozen.functional import checked_cross_entropy, frozen_head_cross_entropy
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig
from megatron_frozen.layers.parts import dgrad_in_fp32, is_watched
from megatron_frozen.layout import fold_leading
from megatron_frozen.main_grad import name_parameters
from megatron_frozen.models.config import DecoderConfig, check_tensor_parallel
from megatron_frozen.models.decoder import Decoder
from megatron_frozen.models.documents import DocumentLengths, plan_attention
from megatron_frozen.models.entry import column_config, enter_tensor_parallel
from megatron_frozen.params import SharesGroups
from megatron_frozen.partition import padded_vocab_size


class CausalLM(SharesGroups):
    """A Llama-family language model over tensor-parallel layers. State-dict keys are the Hugging Face ones.

    Attributes:
        config: the DecoderConfig.
        parallel: the ModelParallelConfig, sequence parallelism off where there is one rank.
        tp_group: the tensor-parallel group; None for one rank.
        activation_checkpointing: recompute each layer in the backward instead of keeping its activations.
        source_folder: the folder that the weights were read from, as the caller named it; None if there was none.

    Collectives over the group: forward, one all-reduce for the embedding and for each attention and MLP, and two small
    ones for the loss; backward, one for each attention and MLP and for the head. Under sequence parallelism each of
    these but the loss's becomes a reduce-scatter, with an all-gather on the other pass.

    Raises ConfigError where heads or MLP width do not divide by the number of ranks.
    """

    def __init__(self, config: DecoderConfig, *, parallel: ModelParallelConfig, tp_group: Group = None) -> None:
        super().__init__()
        self.tp_group = chosen_group(tp_group)
        tp_size = group_size(self.tp_group)
        check_tensor_parallel(config, tp_size)
        if tp_size == 1:
            parallel = dataclasses.replace(parallel, sequence_parallel=False)
        self.config, self.parallel = config, parallel
        self.activation_checkpointing = False
        self.source_folder: str | None = None
        self.model = Decoder(config, parallel=parallel, tp_group=self.tp_group)
        vocab_size = padded_vocab_size(config.vocab_size, world_size=tp_size)
        vocab_shard = vocab_size // tp_size
        self.num_real_columns = min(max(config.vocab_size - group_rank(self.tp_group) * vocab_shard, 0), vocab_shard)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=column_config(parallel),
            init_method=partial(nn.init.normal_, std=config.initializer_range),
            bias=False,
            skip_weight_param_allocation=config.tie_word_embeddings,
            disable_grad_reduce=True,  # enter_tensor_parallel does it
            tp_group=self.tp_group,
        )
        name_parameters(self)

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's logits [b, s, V / tp], contiguous, or with ``labels`` the fp32 loss of each token [b, s].

        Args:
            input_ids: token ids [b, s].
            labels: the target of each position [b, s] (already shifted); -100 gives loss 0 and no gradient.
            document_lengths: per row the lengths of its packed documents, which sum to s; attention and positions
                start anew at each. None: each row is one document.
            position_ids: positions [b, s] in place of those that the documents give; the highest of them is what
                dynamic RoPE stretches to, in place of each document's length.

        Raises LayoutError where a shape does not fit, under sequence parallelism s does not divide by the ranks, or, on
        the CPU, an id is out of the vocabulary (on a GPU looking would stall it).
        """
        self._check_shapes(input_ids, labels=labels, position_ids=position_ids)
        self._check_ids(input_ids, labels=labels)
        plan = plan_attention(
            num_rows=input_ids.shape[0],
            seq_length=input_ids.shape[1],
            document_lengths=document_lengths,
            windows=self.config.layer_windows,
            device=input_ids.device,
        )
        hidden = self.model(
            input_ids,
            plan,
            position_ids=position_ids,
            activation_checkpointing=self.activation_checkpointing and self.training,
        )
        if labels is None:
            return self._logits(hidden)
        weight = self._frozen_head_weight()
        if weight is None:
            return checked_cross_entropy(self._logits(hidden), labels, group=self.tp_group)
        return frozen_head_cross_entropy(
            enter_tensor_parallel(hidden, parallel=self.parallel, group=self.tp_group).transpose(0, 1),
            weight,
            labels,
            num_real_columns=self.num_real_columns,
            group=self.tp_group,
            dgrad_in_fp32=dgrad_in_fp32(self.parallel),
            output_dtype=self.lm_head.output_dtype,
        )

    def _frozen_head_weight(self) -> Tensor | None:
        """Return the head's weight where losses may be computed from it without calling the head for all logits, in
        chunks of tokens: nothing of it trains in this pass, and neither an adapter nor a hook stands on it."""
        head = self.lm_head
        if type(head) is not ColumnParallelLinear or "forward" in vars(head) or is_watched(head):
            return None
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else head.weight
        if type(weight) is not nn.Parameter or (weight.requires_grad and torch.is_grad_enabled()):
            return None
        return weight

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [b, s, V / tp] of ``hidden`` [s, b, h] as the transpose of [s, b, V / tp], as GPTModel does.

        The small tensor, not the large one, is put into [b, s] memory order first, where it is not in it already.
        """
        entered = enter_tensor_parallel(hidden, parallel=self.parallel, group=self.tp_group)
        entered = entered.transpose(0, 1).contiguous().transpose(0, 1)
        weight = {"weight": self.model.embed_tokens.weight} if self.config.tie_word_embeddings else {}
        logits = self.lm_head(entered, **weight)[0]
        if self.num_real_columns < logits.shape[-1]:  # before the transpose, as a view written into costs two copies
            logits = _SilencePadding.apply(logits, self.num_real_columns)
        return logits.transpose(0, 1)

    def _check_shapes(self, input_ids: Tensor, *, labels: Tensor | None, position_ids: Tensor | None) -> None:
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise LayoutError(f"input_ids has shape {list(input_ids.shape)}; give token ids [batch, sequence]")
        for name, tensor in (("labels", labels), ("position_ids", position_ids)):
            if tensor is not None and tensor.shape != input_ids.shape:
                raise LayoutError(
                    f"{name} has shape {list(tensor.shape)} and input_ids {list(input_ids.shape)}; give them the same"
                )
        tp_size = group_size(self.tp_group)
        if self.parallel.sequence_parallel and input_ids.shape[1] % tp_size:
            raise LayoutError(
                f"the sequence has {input_ids.shape[1]} tokens, which sequence parallelism cannot cut over {tp_size} "
                f"ranks; pad it to a multiple of {tp_size} or turn sequence_parallel off"
            )

    def _check_ids(self, input_ids: Tensor, *, labels: Tensor | None) -> None:
        """Refuse the ids of padded rows too, which the layers, built for the padded vocabulary, would take."""
        if input_ids.device.type != "cpu" or torch.compiler.is_compiling():
            return
        vocab_size = self.config.vocab_size
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids is not None and (highest := int(ids.max())) >= vocab_size:
                raise LayoutError(
                    f"{name} holds the id {highest} for a vocabulary of {vocab_size}; ids go from 0 to "
                    f"{vocab_size - 1}, so use the tokenizer of this checkpoint"
                )


class _SilencePadding(torch.autograd.Function):
    """Set the logits of padded vocabulary rows so low that they never win.

    Shapes: logits [..., V / tp]; the first ``num_real`` columns are real.
    Forward: the padded columns become the lowest finite number, in place; no copy.
    Dgrad: the incoming gradient with zeros in the padded columns; one copy.
    Wgrad: none.
    Dbias: none.
    Collectives: none.
    Saved: nothing.
    Why: a padded row must not take part in the softmax or be sampled, nor train. Only ranks with padding run this, so
        the gradient keeps the order of its rows and their repeats: the sum of dX over ranks expects one layout.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_real: int) -> Tensor:
        ctx.num_real = num_real
        # Not marked as written into, which autograd refuses for the view that a backward hook on the head makes.
        logits = logits.detach()
        logits[..., num_real:] = torch.finfo(logits.dtype).min
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad_RV, fold = fold_leading(grads[0])
        grad_RV = grad_RV.clone()
        grad_RV[:, ctx.num_real :] = 0
        return fold.unfold(grad_RV), None
