#!/usr/bin/env bash
# Several nodes: sbatch --nodes 2 examples/launch/slurm_many_nodes.sh run_gpt2.py --pipelines 3x6,5x10
# srun starts one torchrun on each node; they meet at the first node of the job.
#SBATCH --job-name=penstock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
set -euo pipefail

script=${1:?usage: sbatch slurm_many_nodes.sh run_<model>.py [its options]}
shift
examples=${EXAMPLES:-${SLURM_SUBMIT_DIR:-.}/examples}
processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # whole: cut off by head, scontrol may end with an error
first_node=${nodes%%$'\n'*}
# The port follows from the job's number, so that two jobs that share a node do not collide.
port=$((20000 + SLURM_JOB_ID % 10000))

# SLURM has numbered the nodes; a dynamic rendezvous would print stack traces when the first agent has ended a good run.
srun bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$processes" \
    --master-addr "$first_node" \
    --master-port "$port" \
    "$examples/$script" "$@"
