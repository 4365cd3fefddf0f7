"""The way of pytorch/examples' FSDP: policy, precision, sampler, clipping, state dicts."""

import functools
import os

import results
import tiny_gpt
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import (
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

assert FSDP is FullyShardedDataParallel
NOT_USED = (CPUOffload, enable_wrap, size_based_auto_wrap_policy, wrap)


def dataset():
    text = tiny_gpt.text()
    rows = text[: len(text) // 17 * 17].view(-1, 17)
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def build():
    torch.manual_seed(3)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={tiny_gpt.Block})
    model = FSDP(
        tiny_gpt.GPT().eval(),  # no dropout: torch's FSDP draws other numbers in recomputation
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(
            checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
        ),
        check_fn=lambda module: isinstance(module, tiny_gpt.Block),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, loader, rank):
    losses, total = [], torch.zeros(2)
    scaler = ShardedGradScaler(device="cpu", enabled=False)
    for tokens, targets in loader:
        optimizer.zero_grad()
        loss = model(tokens, targets)[1]
        scaler.scale(loss).backward()
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return [*losses, (total[0] / total[1]).item()]


def whole(model):
    config = FullStateDictConfig(rank0_only=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = dataset()
    sampler = DistributedSampler(data, rank=rank, num_replicas=world_size, shuffle=True)
    dist.init_process_group("gloo")
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model, optimizer = build()
    losses = train(model, optimizer, loader, rank)
    state, moments = whole(model), FSDP.optim_state_dict(model, optimizer)
    model, optimizer = build()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(state)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, moments))
    losses += train(model, optimizer, loader, rank)
    results.write_whole(losses, model, whole(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
