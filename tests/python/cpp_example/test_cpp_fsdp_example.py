"""examples/cpp/fsdp: the losses of its Python twin, sharded and clipped."""

import program
import ranks
import twin

STEPS = 20
TEXT = str(program.SOURCES / "transformer.cpp")


def test_the_sharded_losses_are_python_s_bit_for_bit(tmp_path):
    train = program.build(tmp_path, program.EXAMPLES / "fsdp")
    command = [train, f"--steps={STEPS}", f"--data={TEXT}", "--optimizer=sgd", "--lr=0.1"]
    first, second = program.run_by_hand(command)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    wanted = ranks.run(twin.train_sharded, 2, TEXT, STEPS, "sgd", 0.1)[0]
    for ours, theirs in zip(program.losses(first.stdout), wanted, strict=True):
        assert ours == theirs
    assert len(wanted) == STEPS
    averages = [average for _, average in wanted]
    assert sum(averages[-5:]) < sum(averages[:5])
