#!/usr/bin/env bash
# A run that survives lost nodes: sbatch --nodes 4 examples/launch/elastic_slurm.sh train.py
# The batch host serves the store; each node has a torchrun of its own, and --no-kill keeps the job when one is lost. To
# add nodes later, submit again with STORE=tcp://<batch host>:<port>.
#SBATCH --job-name=penstock-elastic
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --no-kill
set -euo pipefail

script=${1:?usage: sbatch elastic_slurm.sh train.py [its options]}
shift
if [ -z "${STORE:-}" ]; then
    port=$((20000 + SLURM_JOB_ID % 10000))
    penstock store --port "$port" &
    export STORE="tcp://$(hostname -f):$port"
    trap 'kill %1' EXIT
fi
# One step for each node: a step of several nodes would end with the first of them.
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    srun --no-kill --nodes 1 --ntasks 1 --nodelist "$node" \
        torchrun --standalone --nproc-per-node "${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" --max-restarts 0 \
        "$script" "$@" &
    steps="${steps:-} $!"
done
# A node that was lost ends its own step; the run has succeeded if any has.
status=1
for step in $steps; do
    if wait "$step"; then status=0; fi
done
exit "$status"
