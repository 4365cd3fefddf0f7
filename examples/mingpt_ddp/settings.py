"""The configuration as typed dataclasses, checked.

config = read(cfg)             # cfg: what Hydra made of gpt2_train_cfg.yaml and the overrides
config.trainer_config.batch_size
"""

from dataclasses import dataclass

from char_dataset import DataConfig
from errors import UserError
from model import GPTConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from trainer import OptimizerConfig, TrainerConfig


@dataclass
class Config:
    gpt_config: GPTConfig
    optimizer_config: OptimizerConfig
    data_config: DataConfig
    trainer_config: TrainerConfig


#: What must hold, and the words for it.
POSITIVE = {
    "gpt_config": ("n_layer", "n_head", "n_embd"),
    "optimizer_config": ("learning_rate",),
    "data_config": ("block_size", "stride", "train_split", "truncate"),
    "trainer_config": ("max_epochs", "batch_size", "grad_norm_clip", "save_every", "log_every"),
}
SHARES = {
    "gpt_config": ("embd_pdrop", "resid_pdrop", "attn_pdrop"),
    "data_config": ("train_split", "truncate"),
}


def read(cfg: DictConfig) -> Config:
    """Return the dataclasses. Raises: UserError for a wrong key, type or value."""
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), cfg))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the configuration"
        words = str(error).splitlines()[0]
        raise UserError(f"{key}: {words}. Hint: --cfg job shows all keys and values") from error
    _check(config)
    return config


def _check(config: Config) -> None:
    for section, names in POSITIVE.items():
        for name in names:
            _need(getattr(getattr(config, section), name) > 0, config, section, name, "above 0")
    for section, names in SHARES.items():
        for name in names:
            _need(getattr(getattr(config, section), name) <= 1, config, section, name, "at most 1")
    gpt, trainer = config.gpt_config, config.trainer_config
    multiple = f"a multiple of n_head={gpt.n_head}"
    _need(gpt.n_embd % gpt.n_head == 0, config, "gpt_config", "n_embd", multiple)
    known = trainer.amp_dtype in ("float16", "bfloat16")
    _need(known, config, "trainer_config", "amp_dtype", "float16 or bfloat16")
    _need(trainer.snapshot_path, config, "trainer_config", "snapshot_path", "a path or URL")
    for name in ("data_loader_workers", "snapshot_every", "snapshot_storage"):
        _need(getattr(trainer, name) >= 0, config, "trainer_config", name, ">= 0")
    _need(trainer.snapshot_folder, config, "trainer_config", "snapshot_folder", "a path")


def _need(holds, config: Config, section: str, name: str, wanted: str) -> None:
    if not holds:
        value = getattr(getattr(config, section), name)
        raise UserError(f"{section}.{name}={value} is not possible. Hint: it must be {wanted}")
