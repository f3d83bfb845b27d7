#!/usr/bin/env bash
# This library's pipelines: one over the GPUs of each node, unless --pipelines says otherwise.
# Further arguments go to trainer.py.
#   srun -p PARTITION -t 1:00:00 --gpus-per-node=8 --cpus-per-task=96 --nodes=4 "$PWD/launch_4_node_pp.sh"
exec "$(dirname "${BASH_SOURCE[0]}")/launch/node.sh" --mode=pp "$@"
