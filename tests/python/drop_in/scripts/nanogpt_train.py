"""The way of nanoGPT's train.py: RANK decides, micro steps by hand, rank 0 evaluates alone."""

import math
import os

import results
import tiny_gpt
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

learning_rate, max_iters, warmup_iters, eval_interval = 1e-2, 12, 3, 5
gradient_accumulation_steps, batch_size, grad_clip = 4, 4, 1.0

ddp = int(os.environ.get("RANK", -1)) != -1
assert ddp, "start this with a launcher"
device_type = "cuda" if torch.cuda.is_available() else "cpu"
init_process_group(backend="nccl" if device_type == "cuda" else "gloo")
ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
device = f"cuda:{ddp_local_rank}" if device_type == "cuda" else "cpu"
master_process = ddp_rank == 0
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + ddp_rank)
data = tiny_gpt.text()


def get_batch():
    starts = torch.randint(len(data) - tiny_gpt.CONTEXT, (batch_size,))
    x = torch.stack([data[i : i + tiny_gpt.CONTEXT] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + tiny_gpt.CONTEXT] for i in starts])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.stack([model(*get_batch())[1] for _ in range(3)])
    model.train()
    return losses.mean().item()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * it / max_iters))


model = tiny_gpt.GPT().to(device)
scaler = torch.amp.GradScaler(device_type, enabled=True, init_scale=1024.0)
optimizer = model.configure_optimizers(learning_rate)
model = DDP(model, device_ids=[ddp_local_rank] if device_type == "cuda" else None)
raw_model = model.module

losses = []
X, Y = get_batch()
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses.append(estimate_loss())
        checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, os.path.join(os.environ["RESULTS"], "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with torch.autocast(device_type, torch.bfloat16, enabled=iter_num % 2 == 1):
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * gradient_accumulation_steps)

results.write(losses, model)
destroy_process_group()
