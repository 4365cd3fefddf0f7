"""Runs of examples/mingpt_ddp with a tiny model: in this process, or under a launcher."""

import re

from example_modules import load
from hydra import compose, initialize_config_dir
from launches import finish, launch

mingpt = load("mingpt_ddp")
UserError = mingpt.errors.UserError
SCRIPT = mingpt.folder / "main.py"

LINE = "the quick brown fox jumps over the lazy dog.\n"
TINY = [
    "gpt_config.n_layer=2",
    "gpt_config.n_head=2",
    "gpt_config.n_embd=32",
    "gpt_config.embd_pdrop=0",
    "gpt_config.resid_pdrop=0",
    "gpt_config.attn_pdrop=0",
    "optimizer_config.learning_rate=0.003",
    "data_config.block_size=16",
    "data_config.stride=8",
    "data_config.truncate=1.0",
    "trainer_config.max_epochs=2",
    "trainer_config.batch_size=8",
    "trainer_config.device=cpu",
    "trainer_config.log_every=5",
]
EPOCH = re.compile(r"^epoch (\d+) \| train loss ([\d.]+) \| test loss ([\d.]+)$", re.M)


def config(*overrides):
    """What main.py would use with these overrides."""
    with initialize_config_dir(str(mingpt.folder), version_base="1.3"):
        return mingpt.settings.read(compose("gpt2_train_cfg", [*TINY, *map(str, overrides)]))


def places(text, snapshot) -> list[str]:
    return [f"data_config.path={text}", f"trainer_config.snapshot_path={snapshot}"]


def train(text, snapshot, *overrides):
    """Train in this process; return (train loss, test loss) of each epoch."""
    return mingpt.main.run(config(*places(text, snapshot), *overrides))


def script(folder, launcher, *overrides, **environment) -> tuple[int, str]:
    """Run main.py as a user would; `launcher` is [] or a launcher's module and flags."""
    command = [*launcher, SCRIPT, *TINY, *overrides]
    (result,) = finish(launch(command, folder, **environment))
    return result


def losses(output: str) -> list[tuple[float, float]]:
    """The epochs' losses that main.py printed, in order."""
    return [(float(train), float(test)) for _, train, test in EPOCH.findall(output)]
