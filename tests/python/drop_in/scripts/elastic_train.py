"""The way of DLRover's nanoGPT: a timeout, no_sync, a sampler of its own, "module." checkpoints."""

import contextlib
import io
from datetime import timedelta

import results
import tiny_gpt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ElasticSampler(DistributedSampler):
    """Skips what was consumed before a restart."""

    completed = 16

    def __iter__(self):
        rank, replicas = self.rank, self.num_replicas
        return iter([self.completed + i * replicas + rank for i in range(len(self))])

    def __len__(self):
        return (len(self.dataset) - self.completed) // self.num_replicas


def setup():
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=120)
    )
    assert dist.is_initialized()
    assert dist.get_backend(_get_default_group()) == "gloo"
    return dist.get_rank()


def exchange(rank):
    """What flash checkpoints ask of a group: sub-groups, objects, small tensors."""
    group = dist.new_group(ranks=[0, 1], backend="gloo", timeout=timedelta(seconds=60))
    parts = [torch.zeros(1) for _ in range(group.size())]
    dist.all_gather(parts, torch.tensor([rank + 1.0]), group=group)
    assert [part.item() for part in parts] == [1, 2]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    box = [{"step": 3} if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert (objects[1], box[0]) == ({"rank": 1}, {"step": 3})
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    dist.monitored_barrier(group)
    dist.barrier()
    assert total.item() == 3


def train(model, optimizer, loader):
    losses = []
    for step, (x, y) in enumerate(loader):
        last = step % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(x, y)[1]
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    rank = setup()
    exchange(rank)
    torch.manual_seed(rank)
    model = DDP(tiny_gpt.GPT(buffered=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    assert str(model.device) == "cpu"
    chunks = tiny_gpt.text(17 * 96).view(96, 17)
    dataset = TensorDataset(chunks[:, :-1], chunks[:, 1:])
    losses = train(model, optimizer, DataLoader(dataset, 4, sampler=ElasticSampler(dataset)))
    state = model.state_dict()
    assert all(name.startswith("module.") for name in state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    results.write(losses, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
