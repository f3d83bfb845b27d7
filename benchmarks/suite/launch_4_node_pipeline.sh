#!/usr/bin/env bash
# Pipeline + DDP: every process drives a pipeline over two GPUs (NDEVICE_PER_PROC), DDP across the processes.
# Further arguments go to trainer.py.
#   srun -p PARTITION -t 1:00:00 --gpus-per-node=8 --cpus-per-task=96 --nodes=4 "$PWD/launch_4_node_pipeline.sh"
export NDEVICE_PER_PROC="${NDEVICE_PER_PROC:-2}"
exec "$(dirname "${BASH_SOURCE[0]}")/launch/node.sh" --mode=pdp "$@"
