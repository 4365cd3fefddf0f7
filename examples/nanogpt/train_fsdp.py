"""The training of train.py with parameters, gradients and moments sharded over the ranks.

    libddp run --nproc-per-node=2 train_fsdp.py --max_iters=1000

Keys, files and losses are those of train.py, and each takes up the other's checkpoints, on any
number of ranks.
"""

import sys

from config import run_script
from train import main

if __name__ == "__main__":
    sys.exit(run_script(lambda arguments: main(arguments, shard=True), "train_fsdp.py"))
