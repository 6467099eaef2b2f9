#!/usr/bin/env bash
# Trains on several nodes with torchrun alone. Start it on every node, with the same arguments and another NODE_RANK:
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node-a examples/multi_node.sh job.yaml tensor_model_parallel_size=8
#   NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=node-a examples/multi_node.sh job.yaml tensor_model_parallel_size=8
#
# MASTER_ADDR is node 0 as the others reach it, MASTER_PORT a free port there (29500 if not set). RANKS_PER_NODE is the
# number of GPUs if not set. A tensor-parallel size of at most that keeps the frequent collectives within a node. The
# model, the data and the output folder lie where every node sees them under one name.
set -euo pipefail

: "${NUM_NODES:?is the number of nodes; set it}"
: "${NODE_RANK:?is the number of this node, from 0; set it}"
: "${MASTER_ADDR:?is the address of node 0; set it}"

exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes "$NUM_NODES" --node-rank "$NODE_RANK" --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    -m megatron_frozen train "$@"
