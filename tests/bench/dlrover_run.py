"""dlrover-run of dlrover 0.6.1, as it has to be called on torch 2.15.

    python tests/bench/dlrover_run.py --standalone --nproc-per-node=2 train.py

It starts its master through torch's SubprocessHandler, which by now asks for `numa_options`: here
it gets None. Nothing else differs. Python 3.13 has no telnetlib, which DLRover imports.
"""

import functools
import sys

from dlrover.trainer.torch import elastic_run
from torch.distributed.elastic.multiprocessing.api import SubprocessHandler

if __name__ == "__main__":
    elastic_run.SubprocessHandler = functools.partial(SubprocessHandler, numa_options=None)
    sys.exit(elastic_run.main())
