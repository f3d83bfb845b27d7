#!/usr/bin/env bash
# One machine, a pipeline over all its GPUs: bash examples/launch/qlora.sh --model meta-llama/Llama-3.1-8B --rank 16
# RANKS=2 starts so many processes instead, also without a GPU.
set -euo pipefail

: "${1:?usage: bash examples/launch/qlora.sh --model meta-llama/Llama-3.1-8B [options of run_qlora.py]}"
examples=$(dirname "$0")/..
ranks=${RANKS:-$(nvidia-smi --list-gpus | wc -l)}

exec torchrun --standalone --nproc-per-node "$ranks" "$examples/run_qlora.py" --stages "$ranks" "$@"
