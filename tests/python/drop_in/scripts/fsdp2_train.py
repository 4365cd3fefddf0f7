"""The way of pytorch/examples' FSDP2: fully_shard, clipping, accumulation, whole state dicts."""

import results
import tiny_gpt
import torch
import torch.distributed as dist
from torch.distributed._composable.fsdp import fully_shard as composable
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

assert composable is fully_shard
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def build(seed=3):
    torch.manual_seed(seed)
    model = tiny_gpt.GPT().eval()
    policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    assert isinstance(model, FSDPModule)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for micro in range(2):
            starts = torch.randint(4000, (4,), generator=generator)
            rows = torch.stack([tiny_gpt.text()[i : i + 17] for i in starts])
            model.set_requires_gradient_sync(micro == 1)
            model.unshard()
            loss = model(rows[:, :-1], rows[:, 1:])[1] / 2
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main():
    dist.init_process_group("gloo")
    model, optimizer = build()
    losses = train(model, optimizer, range(6))
    weights = get_model_state_dict(model, options=WHOLE)
    moments = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    assert bool(weights) == bool(moments) == (dist.get_rank() == 0)
    model, optimizer = build(seed=4)
    set_model_state_dict(model, weights, options=FROM_RANK_0)
    set_optimizer_state_dict(model, optimizer, moments, options=FROM_RANK_0)
    losses += train(model, optimizer, range(6, 10))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    results.write_whole(losses, model, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
