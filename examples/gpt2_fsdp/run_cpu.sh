#!/usr/bin/env bash
# Sets libddp up and trains a small GPT-2 from random weights, sharded over two CPU ranks.
#
#   bash examples/gpt2_fsdp/run_cpu.sh [OUT_DIR] [--key=value ...]
#
# OUT_DIR (default: out/gpt2_fsdp in the checkout) receives the data, metrics.jsonl, TensorBoard
# scalars and checkpoints. A few minutes; stop it whenever you like, the next call goes on from there.
# The text is Python's own standard library; LIBDDP_SOURCE names yours: a folder, file or fsspec URL.
# LIBDDP_RANKS is the number of ranks (default: 2); it may change from call to call.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
LIBDDP_EXTRAS=gpt2
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"

out=$root/out/gpt2_fsdp
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    out=$1
    shift
fi
gpt2=$root/examples/gpt2_fsdp
# One thread per rank: two ranks with a thread pool each would get into each other's way.
export OMP_NUM_THREADS=1

if [ ! -f "$out/data/meta.json" ]; then
    "$LIBDDP_VENV/bin/python" "$gpt2/convert.py" --source="${LIBDDP_SOURCE:-}" --data_dir="$out/data"
fi
exec "$LIBDDP_VENV/bin/libddp" run --standalone --nproc-per-node="${LIBDDP_RANKS:-2}" \
    "$gpt2/train_fsdp.py" --data_dir="$out/data" --out_dir="$out" --tensorboard=True \
    --activation_checkpointing=Block "$@"
