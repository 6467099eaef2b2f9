"""Autograd functions of linear layers, of adapters and of the loss, each a table of its shapes and collectives."""

from megatron_frozen.autograd.cross_entropy import VocabParallelCrossEntropy as VocabParallelCrossEntropy
from megatron_frozen.autograd.frozen_linear import LinearWithFrozenWeight as LinearWithFrozenWeight
from megatron_frozen.autograd.head_loss import FrozenHeadCrossEntropy as FrozenHeadCrossEntropy
from megatron_frozen.autograd.head_loss import HeadPlan as HeadPlan
from megatron_frozen.autograd.low_rank import AddLowRank as AddLowRank
from megatron_frozen.autograd.low_rank import FrozenLinearWithAdapter as FrozenLinearWithAdapter
from megatron_frozen.autograd.low_rank_split import AdaptedParts as AdaptedParts
from megatron_frozen.autograd.low_rank_split import FrozenSplitWithAdapters as FrozenSplitWithAdapters
from megatron_frozen.autograd.split_linear import SplitLinear as SplitLinear
from megatron_frozen.autograd.trainable_linear import (
    LinearWithGradAccumulationAndAsyncCommunication as LinearWithGradAccumulationAndAsyncCommunication,
)
