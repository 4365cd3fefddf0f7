"""examples/cpp/fsdp: the losses of its Python twin, sharded and clipped."""

import program
import pytest
import ranks
import twin

STEPS = 20
TEXT = str(program.SOURCES / "transformer.cpp")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return program.build(tmp_path_factory.mktemp("cpp_fsdp"), program.EXAMPLES / "fsdp")


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adamw", 0.001)])
def test_the_sharded_losses_are_python_s_bit_for_bit(train, optimizer, lr):
    command = [train, f"--steps={STEPS}", f"--data={TEXT}", f"--optimizer={optimizer}"]
    command += [f"--lr={lr}", "--device=cpu"]
    first, second = program.run_by_hand(command)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    wanted = ranks.run(twin.train_sharded, 2, TEXT, STEPS, optimizer, lr)[0]
    for ours, theirs in zip(program.losses(first.stdout), wanted, strict=True):
        assert ours == theirs
    assert len(wanted) == STEPS
    averages = [average for _, average in wanted]
    assert sum(averages[-5:]) < sum(averages[:5])


def test_work_that_is_sharded_already_is_not_shared(train):
    with program.reserved_port() as port:
        place = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = program.run([train, "--optimizer=zero1"], RANK="0", **place)
    assert done.returncode == 1
    assert "--optimizer 'zero1' is for a data-parallel model, this one is sharded." in done.stderr


def test_a_rank_that_is_killed_costs_less_than_an_interval(train, tmp_path):
    program.check_restarted(train, tmp_path, "--optimizer=adamw")


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adamw", 0.001)])
def test_a_training_goes_on_in_the_other_language(train, tmp_path, optimizer, lr):
    def twins(steps, folder=None):
        return ranks.run(twin.train_sharded, 2, TEXT, steps, optimizer, lr, folder)[0]

    arguments = [train, f"--data={TEXT}", f"--optimizer={optimizer}", f"--lr={lr}", "--device=cpu"]
    program.check_goes_on_in_python(arguments, twins(10), tmp_path, twins)


def test_a_training_goes_on_on_other_ranks(train, tmp_path):
    """Two ranks, then one: it sees one rank's batches, and its losses begin where the two's end."""
    command = [train, f"--data={TEXT}", "--device=cpu", f"--snapshot-folder={tmp_path / 'saved'}"]
    first, second = program.run_by_hand([*command, "--steps=30", "--snapshot-storage=30"])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    with program.reserved_port() as port:
        place = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        alone = program.run([*command, "--steps=32", "--snapshot-storage=32"], RANK="0", **place)
    assert alone.returncode == 0, alone.stderr
    resumed, printed = alone.stdout.split("\n", 1)
    assert resumed == "resuming at step 30"
    before = program.losses(first.stdout)
    for own, average in program.losses(printed, first=30):
        assert own == average
        assert own < before[10][1]
