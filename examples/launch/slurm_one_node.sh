#!/usr/bin/env bash
# One node: sbatch examples/launch/slurm_one_node.sh run_gpt2.py --pipelines 1x2,3x6
# Without arguments the script chooses its pipelines from the number of processes.
#SBATCH --job-name=penstock
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
set -euo pipefail

script=${1:?usage: sbatch slurm_one_node.sh run_<model>.py [its options]}
shift
examples=${EXAMPLES:-${SLURM_SUBMIT_DIR:-.}/examples}
processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

srun torchrun --standalone --nproc-per-node "$processes" "$examples/$script" "$@"
