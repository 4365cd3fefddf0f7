#!/usr/bin/env bash
# Sets libddp up and trains a small GPT on two CPU ranks for about two minutes.
#
#   bash examples/quickstart.sh [OUT_DIR] [--key=value ...]
#
# OUT_DIR (default: LIBDDP_OUT, or out/quickstart in the checkout) receives metrics.jsonl, loss.png,
# sample.txt and a checkpoint. The text is Python's own standard library; --data=PATH takes yours.
# Stop it whenever you like: the next call goes on from there, losing at most the last few seconds.
# Once it is complete, the next call trains for as long again.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"

out=${LIBDDP_OUT:-$root/out/quickstart}
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    out=$1
    shift
fi

echo "quickstart: two ranks, results in $out"
# One thread per rank: two ranks with a thread pool each would get into each other's way.
export OMP_NUM_THREADS=1
nanogpt=$root/examples/nanogpt
exec "$LIBDDP_VENV/bin/libddp" run --standalone --nproc-per-node=2 "$nanogpt/train.py" \
    --config="$nanogpt/quickstart.json" --out_dir="$out" "$@"
