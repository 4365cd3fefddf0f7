"""Texts and snapshots on an S3 server: train, resume, and what is refused."""

import boto3
import pytest
from launches import ranks
from mingpt_runs import LINE, UserError, losses, mingpt, places, script, train

ONE = "trainer_config.max_epochs=1"


def test_save_and_resume(s3, text_file):
    client = boto3.client("s3")
    client.put_object(Bucket="runs", Key="text.txt", Body=text_file.read_bytes())
    whole = train(text_file, "memory://s3/whole.pt")
    path = "s3://runs/deep/down/snapshot.pt"
    assert train("s3://runs/text.txt", path, ONE) == whole[:1]
    assert train("s3://runs/text.txt", path) == whole[1:]
    keys = [item["Key"] for item in client.list_objects_v2(Bucket="runs")["Contents"]]
    assert sorted(keys) == ["deep/down/snapshot.pt", "text.txt"]


def test_no_bucket_is_found_before_training(s3, text_file, capsys):
    with pytest.raises(UserError, match=r"cannot write the snapshot s3://none/s\.pt: .*bucket"):
        train(text_file, "s3://none/s.pt")
    assert "epoch" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"path=s3://runs/none.txt: No such file"):
        train("s3://runs/none.txt", "memory://s3/none.pt")


def test_no_credentials(s3, monkeypatch, tmp_path):
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    nothing = str(tmp_path / "nothing")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", nothing)
    monkeypatch.setenv("AWS_CONFIG_FILE", nothing)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match=r"cannot write the file s3://runs/x: .*credentials"):
        mingpt.storage.replace("s3://runs/x", b"x")


def test_two_ranks_resume_what_one_began(s3, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(LINE * 40)
    whole = train(text, "memory://s3/ranks.pt")
    path = "s3://runs/snapshot.pt"
    train(text, path, ONE)
    status, output = script(tmp_path, ranks(2, forked=True), *places(text, path))
    assert status == 0, output
    assert output.count(f"resuming {path} after epoch 1") == 1
    (second,) = losses(output)
    assert second == pytest.approx(whole[1], rel=1e-3)
