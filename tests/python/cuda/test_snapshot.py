"""Snapshots of models on the fake device: copies come behind what their streams have been given."""

import fakegpu
import fsdp_models as models
import mock_nccl
import pytest
import ranks
import torch

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))


def build(kind, seed):
    from libddp.nn.parallel import DistributedDataParallel

    from libddp.optim import AdamW

    model = models.build(seed=seed).to("fakegpu")
    model = DistributedDataParallel(model) if kind == "ddp" else getattr(models, kind)(model)
    return model, AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, batches):
    losses = []
    for batch in batches:
        _, loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def goes_on(kind, run):
    """The steps behind a save, and the same steps of a model that has loaded it."""
    from libddp.distributed import destroy_process_group, get_rank, init_process_group

    import libddp

    fakegpu.load()
    mock_nccl.install()
    init_process_group("libddp")
    torch.fakegpu.set_device(get_rank())
    fakegpu.reset()
    batches = torch.randint(13, (4, 3, 6), generator=torch.Generator().manual_seed(get_rank()))
    batches = batches.to("fakegpu")
    model, optimizer = build(kind, 1)
    train(model, optimizer, batches[:2])
    snapshot = libddp.Snapshot(run=run, linger=5)
    report = snapshot.save(2, model, optimizer)  # nothing waits for the steps before it
    assert report.bytes > 0
    wanted = train(model, optimizer, batches[2:])
    model, optimizer = build(kind, 2)
    snapshot.load(model, optimizer)
    assert all(p.device.type == "fakegpu" for p in model.parameters())
    assert train(model, optimizer, batches[2:]) == wanted
    assert fakegpu.races() == []
    torch.distributed.barrier()
    snapshot.close()
    destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "shard", "wrap"])
def test_a_loaded_model_goes_on_as_the_saved_one(kind, tmp_path):
    ranks.run(goes_on, 2, kind, f"fake-{kind}-{tmp_path.name[-8:]}")
