#!/usr/bin/env bash
# Starts one node's processes of the benchmark with torchrun. srun runs it once on every node; the arguments are the
# trainer's. Where this stands, trainer.py is one folder up.
#
# Environment, all optional:
#   NDEVICE_PER_PROC  GPUs that each process drives (default 1)
#   GPUS_PER_NODE     default: what SLURM gave, else what nvidia-smi lists
#   MASTER_PORT       default: follows from the job's number, so that two jobs on one node do not collide
#   TORCHRUN          default: torchrun
set -euo pipefail

folder="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    echo "error: no SLURM job: start this with srun, or sbatch launch/benchmark.sbatch" >&2
    exit 2
fi
if [[ "${SLURM_LOCALID:-0}" != 0 ]]; then
    echo "error: more than one task on $(hostname): torchrun starts the processes, so use --ntasks-per-node=1" >&2
    exit 2
fi

nodes="${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}"
# The first host is where all agents meet. SLURM has numbered the nodes, so nothing is left to a dynamic rendezvous, whose
# agents print stack traces when the first of them has ended a good run.
read -r head < <(scontrol show hostnames "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST}}")

gpus="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}}"
gpus="${gpus##*:}" # "h100:8" is eight GPUs
if [[ -z "${gpus}" ]]; then
    gpus="$(nvidia-smi --list-gpus | wc -l)"
fi
devices="${NDEVICE_PER_PROC:-1}"
if ((gpus % devices != 0)); then
    echo "error: ${gpus} GPUs on a node cannot be shared out over processes with ${devices} each" >&2
    exit 2
fi

arguments=("$@")
if ((devices > 1)); then
    arguments=("--ndevice_per_proc=${devices}" "$@")
fi

exec "${TORCHRUN:-torchrun}" \
    --nnodes="${nodes}" \
    --nproc_per_node="$((gpus / devices))" \
    --node_rank="${SLURM_NODEID:-0}" \
    --master_addr="${head}" \
    --master_port="${MASTER_PORT:-$((29500 + SLURM_JOB_ID % 10000))}" \
    "${folder}/trainer.py" "${arguments[@]}"
