"""The examples on the device for some steps, started as a user starts them, on one rank."""

import json
import math
from pathlib import Path

import pytest
import torch
from launches import finish, launch, ranks
from subject import DEVICE, IS_CUDA

pytestmark = [pytest.mark.launches, pytest.mark.libddp]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KIND = DEVICE.type
NANOGPT = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=64",
    "--block_size=64",
    "--batch_size=8",
    "--gradient_accumulation_steps=2",
    "--learning_rate=5e-3",
    "--warmup_iters=2",
    "--max_iters=30",
    "--eval_interval=15",
    "--eval_iters=2",
    "--log_interval=5",
    "--sample_tokens=10",
]
GPT2 = [*NANOGPT[:-1], "--save_interval=15"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """This folder's own sources: characters that a network can learn something of."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    sources = "".join(p.read_text() for p in sorted(Path(__file__).parent.glob("*.py")))
    path.write_text(sources[:40_000])
    return path


def run(folder: Path, command: list, launcher: list | None = None) -> str:
    process = launch([*(ranks(1) if launcher is None else launcher), *command], folder)
    ((status, output),) = finish(process, deadline=50)
    assert status == 0, output
    return output


def curve(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["loss"] is not None]


def learns(losses: list[float], at_first: float) -> None:
    assert all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(at_first, rel=0.2)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("script", ["train.py", "train_fsdp.py"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nanogpt(script, dtype, text, tmp_path):
    if not IS_CUDA and dtype == "float16":
        pytest.skip("takes minutes on a CPU")
    out = tmp_path / "out"
    # On the device without being told: --device=auto.
    device = [] if IS_CUDA else ["--device=cpu"]
    command = [EXAMPLES / "nanogpt" / script, *NANOGPT, f"--data={text}", f"--out_dir={out}"]
    output = run(tmp_path, [*command, f"--dtype={dtype}", *device])
    assert f"parameters on {KIND}" in output
    learns(curve(out), math.log(len(set(text.read_text()))))
    resumed = run(tmp_path, [*command, f"--dtype={dtype}", *device, "--max_iters=35"], launcher=[])
    assert "at iteration 30" in resumed


@pytest.mark.cuda
def test_nanogpt_has_half_precision_by_default(text, tmp_path):
    output = run(
        tmp_path, [EXAMPLES / "nanogpt/train.py", *NANOGPT, f"--data={text}", "--out_dir=out"]
    )
    wanted = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    assert f"on cuda in {wanted}" in output


@pytest.mark.limit(120)
def test_nanogpt_compiled(text, tmp_path):
    command = [EXAMPLES / "nanogpt/train.py", *NANOGPT, f"--data={text}", "--out_dir=out"]
    run(tmp_path, [*command, f"--device={KIND}", "--compile=True", "--max_iters=10"])


@pytest.mark.parametrize("amp", ["none", "float16", "bfloat16"])
def test_mingpt(amp, text, tmp_path):
    """Without Hydra, which machines with GPUs may lack: mingpt.py reads the same yaml file."""
    if not IS_CUDA and amp == "float16":
        pytest.skip("takes minutes on a CPU")
    program = Path(__file__).with_name("mingpt.py")
    output = run(tmp_path, [program, f"--text={text}", f"--device={KIND}", f"--amp={amp}"])
    found = json.loads(output.strip().splitlines()[-1])
    assert found["device"].startswith(KIND)
    first, last = found["losses"]
    assert last[0] < first[0]
    assert math.isfinite(last[1])


@pytest.fixture(scope="module")
def data(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    command = [EXAMPLES / "gpt2_fsdp/convert.py", f"--source={text}", f"--data_dir={folder}"]
    run(folder, [*command, "--vocab_size=512"], launcher=[])
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpt2_fsdp_as_torchs_engine(precision, data, tmp_path):
    losses = {}
    for engine in ("libddp", "torch"):
        out = tmp_path / engine
        command = [EXAMPLES / "gpt2_fsdp/train_fsdp.py", *GPT2, f"--data_dir={data}"]
        command += [f"--out_dir={out}", f"--device={KIND}", f"--mixed_precision={precision}"]
        # Gradients that torch's engine keeps in bf16 under no_sync are an error of its own in 2.15.
        command += ["--no_sync=False"]
        run(tmp_path, [*command, "--activation_checkpointing=Block", f"--engine={engine}"])
        losses[engine] = curve(out)
    tolerance = 1e-3 if precision == "fp32" else 2e-2
    assert losses["libddp"] == pytest.approx(losses["torch"], rel=tolerance)
    learns(losses["libddp"], math.log(512))


@pytest.mark.cuda
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "device"])
def test_gpt2_fsdp_resumes(offload, data, tmp_path):
    command = [EXAMPLES / "gpt2_fsdp/train_fsdp.py", *GPT2, f"--data_dir={data}", "--out_dir=out"]
    command += ["--mixed_precision=bf16", f"--cpu_offload={offload}"]
    run(tmp_path, command)
    assert "30" in run(tmp_path, [*command, "--max_iters=40"])


@pytest.mark.limit(120)
def test_what_to_do_when_ddp_does_not_fit(tmp_path):
    """examples/ddp_limits: each of its steps."""
    command = [EXAMPLES / "ddp_limits/limits.py", "--ranks=1", f"--device={KIND}", "--plot=False"]
    command += ["--n_layer=2", "--n_head=2", "--n_embd=64", "--vocab_size=64", "--block_size=32"]
    command += ["--segments=2", "--iterations=1", "--out_dir=out"]
    process = launch(command, tmp_path)
    ((status, output),) = finish(process, deadline=110)
    assert status == 0, output
    rows = json.loads((tmp_path / "out/limits.json").read_text())
    assert rows
