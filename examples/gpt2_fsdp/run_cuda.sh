#!/usr/bin/env bash
# Fine-tunes a pretrained GPT-2 on the GPUs of this host, sharded, in bf16.
#
#   bash examples/gpt2_fsdp/run_cuda.sh gpt2|gpt2-medium|gpt2-large|gpt2-xl|FOLDER [--key=value ...]
#
# LIBDDP_SOURCE  the text: a folder, file or fsspec URL (default: Python's own standard library)
# LIBDDP_OUT     results (default: out/gpt2_fsdp-MODEL in the checkout)
# LIBDDP_RANKS   ranks (default: one for each GPU)
#
# Weights and the tokenizer's tables come from the hub, or from FOLDER where there is no network. A
# tokenizer that is learned from the text would not fit to pretrained weights, so none is.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
LIBDDP_EXTRAS=gpt2
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"

model=${1:-gpt2}
shift || true
gpt2=$root/examples/gpt2_fsdp
out=${LIBDDP_OUT:-$root/out/gpt2_fsdp-$(basename "$model")}
ranks=${LIBDDP_RANKS:-$("$LIBDDP_VENV/bin/python" -c 'import torch; print(torch.cuda.device_count())')}
if [ "$ranks" = 0 ]; then
    echo "run_cuda.sh: error: torch sees no GPU here; run_cpu.sh needs none" >&2
    exit 1
fi

tables=gpt2
if [ -d "$model" ]; then tables=$model; fi
if [ ! -f "$out/data/meta.json" ]; then
    "$LIBDDP_VENV/bin/python" "$gpt2/convert.py" --source="${LIBDDP_SOURCE:-}" \
        --data_dir="$out/data" --tokenizer="$tables"
fi
# 24 sequences of 1024 tokens an iteration for up to 24 GPUs whose number divides 24.
exec "$LIBDDP_VENV/bin/libddp" run --standalone --nproc-per-node="$ranks" \
    "$gpt2/train_fsdp.py" --data_dir="$out/data" --out_dir="$out" --device=cuda \
    --hf_model="$model" --block_size=1024 --batch_size=1 --gradient_accumulation_steps=24 \
    --mixed_precision=bf16 --activation_checkpointing=Block --learning_rate=3e-5 --min_lr=3e-6 \
    --tensorboard=True "$@"
