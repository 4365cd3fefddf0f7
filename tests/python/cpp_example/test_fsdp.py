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
