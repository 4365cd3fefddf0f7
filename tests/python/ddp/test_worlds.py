"""Every rank holds the same bits after training, at a world size that is no power of two."""

import ddp_models as models
import ranks
import torch


def train():
    from libddp.distributed import destroy_process_group, get_rank, init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("gloo")
    torch.manual_seed(get_rank())
    model = DistributedDataParallel(models.Mlp(5, 40), bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(3, 40)).pow(2).mean().backward()
        optimizer.step()
    destroy_process_group()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def test_ranks_hold_the_same_bits():
    weights = ranks.run(train, 3)
    assert all(other == weights[0] for other in weights)
