#!/usr/bin/env bash
# Builds libddp on a machine with a GPU, and tests and measures it there, without a network.
#
#   bash tests/gpu/run.sh                      # everything, within 8 minutes on 16 cores
#   bash tests/gpu/run.sh --list               # the steps, in their order
#   bash tests/gpu/run.sh --only ddp --only bench-ddp
#   OUT=results LIBDDP_GPU_NCCL=folder bash tests/gpu/run.sh --budget 560
#
# OUT              where results go (default: tests/gpu/results): results.jsonl, junit.xml, table.md,
#                  log.txt. All are whole at every moment: a run that is cut off loses nothing.
# LIBDDP_GPU_NCCL  folder with a libnccl.so.2 of 2.30 or later, for two ranks on one GPU
# LIBDDP_JSON_DIR  folder with nlohmann/json.hpp, where neither the Python package nlohmann-json nor
#                  the system has it
# LIBDDP_GPU_TRACES  folder for the traces of the steps whose kernels the benches count
# LIBDDP_PYTHON    a Python that has torch (default: python3)
#
# Needs torch (a CUDA build), cmake, ninja, scikit-build-core, pytest, and a C++ compiler; no nvcc.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
exec "${LIBDDP_PYTHON:-python3}" -u tests/gpu/runner.py "$@"
