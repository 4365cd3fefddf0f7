"""`libddp run` on two hosts: two agents, c10d rendezvous, the examples as users start them."""

import contextlib
import os
import re
import subprocess
from pathlib import Path

import ranks
from forked_program import ForkedProgram
from network import Network

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 100


def run_on_hosts(net, ranks_per_host: int, script: Path, arguments, folder) -> list[str]:
    """What the agents of all hosts printed; fails unless all of them end well."""
    agents, logs = [], []
    with contextlib.ExitStack() as stack:
        for host, address in enumerate(net.addresses):
            log = folder / f"agent-{host}"
            flags = [
                f"--nnodes={len(net.addresses)}",
                f"--nproc-per-node={ranks_per_host}",
                "--rdzv-backend=c10d",
                "--rdzv-id=hosts",
                f"--rdzv-endpoint={net.addresses[0]}:29400",
                f"--rdzv-conf=is_host={int(host == 0)}",
                f"--local-addr={address}",
            ]
            agent = ForkedProgram(
                ["-m", "libddp", "run", *map(str, (*flags, script, *arguments))],
                folder,
                {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                log,
                net.hosts[host],
            )
            stack.callback(end, net, host, agent)
            agents.append(agent)
            logs.append(log)
        for agent in agents:
            agent.wait(200)
    texts = [log.read_text(errors="replace") for log in logs]
    for agent, text in zip(agents, texts, strict=True):
        assert agent.returncode == 0, text[-6000:]
    return texts


def end(net, host: int, agent) -> None:
    """The agent, and its workers, which lead sessions of their own."""
    ranks.kill_session(agent)
    found = subprocess.run(
        ["ip", "netns", "pids", net.hosts[host]], capture_output=True, text=True, timeout=30
    )
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)


def test_nanogpt_on_two_hosts(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = [
        *("--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4"),
        *("--max_iters=4", "--warmup_iters=1", "--eval_interval=4", "--eval_iters=1"),
        *("--log_interval=1", "--device=cpu", "--sample_tokens=0"),
        *(f"--out_dir={tmp_path / 'out'}", f"--data={text}"),
    ]
    with Network(2) as net:
        run_on_hosts(net, 2, EXAMPLES / "nanogpt" / "train.py", arguments, tmp_path)
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count('"loss"') >= 4


def test_mingpt_on_two_hosts(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = [
        *("gpt_config.n_layer=1", "gpt_config.n_head=2", "gpt_config.n_embd=32"),
        *("data_config.block_size=16", "data_config.stride=16", "data_config.truncate=1.0"),
        *("trainer_config.max_epochs=1", "trainer_config.batch_size=16"),
        *("trainer_config.device=cpu", f"data_config.path={text}"),
        f"trainer_config.snapshot_path={tmp_path / 'snapshot.pt'}",
    ]
    with Network(2) as net:
        texts = run_on_hosts(net, 2, EXAMPLES / "mingpt_ddp" / "main.py", arguments, tmp_path)
    assert re.search(r"^epoch 1 \| train loss [\d.]+ \| test loss [\d.]+$", "".join(texts), re.M)
