#!/usr/bin/env bash
# Several machines without a scheduler. On each, beginning with node 0:
#   NODE_RANK=0 MASTER_ADDR=<the first machine> NODES=2 PROCESSES_PER_NODE=4 examples/launch/many_nodes.sh run_gpt2.py
set -euo pipefail

script=${1:?usage: NODE_RANK=... MASTER_ADDR=... many_nodes.sh run_<model>.py [its options]}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

torchrun \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "${PROCESSES_PER_NODE:-4}" \
    --node_rank "${NODE_RANK:?the rank of this machine, 0 on the first}" \
    --master_addr "${MASTER_ADDR:?the address of the first machine}" \
    --master_port "${MASTER_PORT:-29500}" \
    "${EXAMPLES:-$here/..}/$script" "$@"
