"""Arguments of nanoGPT's scripts for a network that trains in no time."""

TINY = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=32",
    "--batch_size=4",
    "--learning_rate=1e-2",
    "--warmup_iters=2",
    "--eval_iters=2",
    "--log_interval=1",
    "--device=cpu",
    "--sample_tokens=20",
]
