#!/usr/bin/env bash
# Runs a command whose processes compute on the GPU at the same time (NVIDIA's multi-process service)
# where there is that service; else they take turns there, and timings say little.
#
#   bash tests/gpu/with_mps.sh python tests/bench/gpu_two_ranks.py
#
# Not for tests that kill processes: what a killed client has left running may fail the others.
set -uo pipefail
if command -v nvidia-cuda-mps-control >/dev/null; then
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY="$CUDA_MPS_PIPE_DIRECTORY"
    nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
else
    echo "no nvidia-cuda-mps-control here: the two processes take turns on the device" >&2
fi
"$@"
