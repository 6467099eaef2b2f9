"""Autograd functions of a linear layer, one per file, each a table of its shapes and collectives."""

from megatron_frozen.autograd.cross_entropy import VocabParallelCrossEntropy as VocabParallelCrossEntropy
from megatron_frozen.autograd.frozen_linear import LinearWithFrozenWeight as LinearWithFrozenWeight
from megatron_frozen.autograd.trainable_linear import (
    LinearWithGradAccumulationAndAsyncCommunication as LinearWithGradAccumulationAndAsyncCommunication,
)
