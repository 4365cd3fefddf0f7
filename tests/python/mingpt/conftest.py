"""A small text, a small configuration, and an S3 server on this machine."""

import pytest
from lone_process import alone
from mingpt_runs import LINE

__all__ = ["alone"]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(LINE * 40, encoding="utf-8")
    return path


@pytest.fixture
def s3(monkeypatch):
    """Environment of an S3 server with the bucket `runs`; it ends with the test."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": host,
        "no_proxy": host,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    s3fs.S3FileSystem.clear_instance_cache()  # another test's server had another port
    try:
        boto3.client("s3").create_bucket(Bucket="runs")
        yield variables
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
