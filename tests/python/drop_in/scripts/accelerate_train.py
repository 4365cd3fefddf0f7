"""A training loop on Accelerate, which asks torch.distributed for everything."""

import results
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    dataset = TensorDataset(torch.rand(64, 8), torch.rand(64, 1))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, 4))
    losses = []
    for source, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(source), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    with accelerator.no_sync(model):
        loss = model(source).mean()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    optimizer.step()
    losses.append(next(model.parameters()).sum().item())
    bare = accelerator.unwrap_model(model)
    assert isinstance(bare, torch.nn.Sequential)
    accelerator.wait_for_everyone()
    results.write(losses, model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
