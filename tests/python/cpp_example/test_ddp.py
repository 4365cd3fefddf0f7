"""examples/cpp/ddp: equal to its Python twin, in every way of starting it, and its errors."""

import program
import pytest
import ranks
import torch
import twin

STEPS = 20
TEXT = str(program.SOURCES / "transformer.cpp")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return program.build(tmp_path_factory.mktemp("cpp_example"))


def command(train, optimizer="sgd", lr=0.1):
    return [
        train,
        f"--steps={STEPS}",
        f"--data={TEXT}",
        f"--optimizer={optimizer}",
        f"--lr={lr}",
        "--device=cpu",
    ]


@pytest.fixture(scope="module")
def sgd_losses():
    return ranks.run(twin.train, 2, TEXT, STEPS, "sgd", 0.1)[0]


def test_started_by_hand_the_losses_are_python_s_bit_for_bit(train, sgd_losses):
    first, second = program.run_by_hand(command(train))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert program.losses(first.stdout) == sgd_losses
    assert len(sgd_losses) == STEPS
    assert second.stdout == ""
    own, average = zip(*sgd_losses, strict=True)
    assert own != average
    assert sum(average[-5:]) < sum(average[:5])


@pytest.mark.parametrize("name", ["torchrun", "libddp"])
def test_started_by_a_launcher_the_losses_are_the_same(train, sgd_losses, name):
    done = program.run([*program.launcher(name), *command(train)])
    assert done.returncode == 0, done.stderr
    assert program.losses(done.stdout) == sgd_losses


@pytest.mark.parametrize("optimizer", ["adamw", "zero1"])
def test_adamw_s_losses_are_python_s_bit_for_bit(train, optimizer):
    """Each against its own twin; those two agree by tests/python/optim."""
    first, _ = program.run_by_hand(command(train, optimizer, 0.001))
    python = ranks.run(twin.train, 2, TEXT, STEPS, optimizer, 0.001)[0]
    assert program.losses(first.stdout) == python


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--data=missing.txt"], "--data 'missing.txt': cannot open it: No such file"),
        (["--data=/"], "--data '/': cannot read it: Is a directory"),
        (["--data=/dev/null"], "it has 0 bytes, and one row takes 33"),
        (["--steps=0"], "--steps '0' is not a number from 1 to 9223372036854775807"),
        (["--lr=nan"], "--lr 'nan' is not a number from 0 to"),
        (["--optimizer=adam"], "--optimizer 'adam' is not 'adamw', 'zero1' or 'sgd'"),
        (["--device=gpu"], "--device 'gpu' is not 'auto', 'cpu' or 'cuda'"),
        (["--snapshot-every=-1"], "--snapshot-every '-1' is not a number from 0 to"),
        (["--data"], "option '--data' needs a value"),
        (["--epochs=3"], "unknown option '--epochs=3'"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_bad_arguments_are_named(train, arguments, text):
    done = program.run([train, *arguments], RANK="0", WORLD_SIZE="1")
    assert done.returncode == 1
    assert done.stderr.startswith("train: rank 0: ")
    assert text in done.stderr
    assert "Hint: " in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_there_is_not_is_named(train):
    done = program.run([train, "--device=cuda"], RANK="0", LOCAL_RANK="1", WORLD_SIZE="1")
    assert done.returncode == 1
    text = "--device 'cuda': this rank takes GPU 1 (LOCAL_RANK), and torch sees 0. Hint: --device"
    assert text in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu(train, sgd_losses):
    first, _ = program.run_by_hand([*command(train), "--device=auto"])
    assert program.losses(first.stdout) == sgd_losses


def test_a_world_size_without_a_rank_is_an_error(train):
    done = program.run([train], WORLD_SIZE="2")
    assert done.returncode == 1
    assert done.stderr.startswith("train: libddp: environment variable RANK is not set")


def test_help_lists_the_options(train):
    done = program.run([train, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "--threads N" in done.stdout


@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_rank_is_killed_the_other_ends_and_names_it(train, killed):
    with program.by_hand([train, "--steps=1000000000", f"--data={TEXT}", "--device=cpu"]) as both:
        assert program.first_line(both[0]).startswith("step 0 ")
        both[killed].kill()
        left = program.finish(both[1 - killed])
    assert left.returncode == 1
    # The library's own report of the failure comes first.
    assert f"\ntrain: rank {1 - killed}: libddp[group world, rank " in left.stderr
    assert f"rank {killed} (pid {both[killed].pid}" in left.stderr
    assert "died" in left.stderr


@pytest.mark.parametrize("optimizer", ["adamw", "zero1"])
def test_a_rank_that_is_killed_costs_less_than_an_interval(train, tmp_path, optimizer):
    program.check_restarted(train, tmp_path, f"--optimizer={optimizer}")


@pytest.mark.parametrize("optimizer", ["adamw", "zero1"])
def test_a_training_goes_on_in_the_other_language(train, tmp_path, optimizer):
    def twins(steps, folder=None):
        return ranks.run(twin.train, 2, TEXT, steps, optimizer, 0.001, folder)[0]

    arguments = [train, f"--data={TEXT}", f"--optimizer={optimizer}", "--lr=0.001", "--device=cpu"]
    program.check_goes_on_in_python(arguments, twins(10), tmp_path, twins)
