"""The command line of train_fsdp.py: forms, types, mistakes."""

import re

import pytest
from gpt2_runs import example

gpt2 = example()
Options, check = gpt2.options.Options, gpt2.options.check
UserError, parse = gpt2.shared.UserError, gpt2.shared.parse


def test_both_forms_and_every_type():
    got = parse(
        Options,
        [
            "--n_layer=2",
            "--n_head",
            "2",
            "--vocab_size",
            "None",
            "--tensorboard",
            "true",
            "--betas=(0.8, 0.9)",
            "--activation_checkpointing=Block,Attention",
            "--learning_rate",
            "3e-4",
            "--hf_model=",
        ],
    )
    assert (got.n_layer, got.n_head, got.vocab_size, got.tensorboard) == (2, 2, None, True)
    assert (got.betas, got.learning_rate, got.hf_model) == ((0.8, 0.9), 3e-4, "")
    assert got.activation_checkpointing == ("Block", "Attention")
    assert parse(Options, ["--vocab_size=100"]).vocab_size == 100
    assert parse(Options, ["--activation_checkpointing="]).activation_checkpointing == ()


def test_a_file_holds_none_and_lists(tmp_path):
    path = tmp_path / "small.json"
    path.write_text('{"betas": [0.5, 0.6], "vocab_size": null, "no_sync": false}')
    got = parse(Options, ["--config", str(path), "--n_layer=3"])
    assert (got.betas, got.vocab_size, got.no_sync, got.n_layer) == ((0.5, 0.6), None, False, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n_layers", "2"], "there is no key 'n_layers'; did you mean n_layer"),
        (["--n_layer"], "cannot read '--n_layer': settings are written --key=value or --key value"),
        (["--n_layer", "--n_head=2"], "cannot read '--n_layer'"),
        (["--vocab_size=many"], "--vocab_size=many: expected a whole number or None"),
        (["--betas=0.9"], "--betas=0.9: expected 2 values, each a number, with commas"),
        (["--tensorboard=yes"], "--tensorboard=yes: expected True or False"),
    ],
)
def test_mistakes_of_form(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse(Options, arguments)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--engine=deepspeed", "--engine=deepspeed: expected one of torch, libddp"),
        ("--sharding_strategy=FULL", "expected one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYB"),
        ("--mixed_precision=int8", "expected one of fp32, bf16, fp16"),
        ("--activation_checkpointing=Blok", "there is no class Blok; did you mean Block?"),
        ("--checkpoint=some", "--checkpoint=some: expected one of sharded, full"),
        ("--n_embd=30", "--n_embd=30 does not divide into --n_head=4 heads"),
        ("--keep_checkpoints=0", "--keep_checkpoints=0: expected at least 1"),
    ],
)
def test_values_that_cannot_be(argument, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(parse(Options, [argument]))


def test_pretrained_weights_bring_their_shape():
    with pytest.raises(UserError, match=r"--n_layer=3: the shape comes with --hf_model=gpt2"):
        check(parse(Options, ["--hf_model=gpt2", "--n_layer=3"]))


def test_an_engine_that_is_not_there_is_an_error(monkeypatch):
    places = gpt2.engine.PLACES | {"distributed.nowhere": ("Nothing",)}
    monkeypatch.setattr(gpt2.engine, "PLACES", places)
    with pytest.raises(UserError, match=r"--engine=libddp: no libddp\.distributed\.\w+ here"):
        gpt2.engine.load("libddp")


@pytest.mark.parametrize("argument", ["--sharding_strategy=HYBRID_SHARD", "--cpu_offload=True"])
def test_what_torch_cannot_do_on_cpus_is_refused(argument):
    options = check(parse(Options, ["--engine=torch", argument]))
    torch_engine = gpt2.engine.load("torch")
    with pytest.raises(UserError, match=argument):
        gpt2.engine.check(torch_engine, options, gpt2.engine.torch.device("cpu"))
