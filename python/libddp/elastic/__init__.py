"""Training whose number of ranks changes: exact positions in the data, fixed global batches.

The modules are those of dlrover.trainer.torch.elastic, with their signatures; a script swaps
`dlrover.trainer.torch` for `libddp`:

    from libddp.elastic.sampler import ElasticDistributedSampler
    from libddp.elastic.dataloader import ElasticDataLoader
    from libddp.elastic.trainer import ElasticTrainer

`run` and `info` are for training that goes on in the same processes:

    @libddp.elastic.run
    def main(): ...

docs/elastic.md tells more, and where they differ from DLRover's. `import libddp` loads none.
"""

from libddp.elastic._in_place import Info, info, run
from libddp.elastic.dataloader import ElasticDataLoader
from libddp.elastic.sampler import ElasticDistributedSampler
from libddp.elastic.trainer import ElasticTrainer

__all__ = [
    "ElasticDataLoader",
    "ElasticDistributedSampler",
    "ElasticTrainer",
    "Info",
    "info",
    "run",
]
