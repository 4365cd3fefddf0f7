"""An S3 server on this machine that fails, is slow and refuses on request.

with FaultyS3() as server:
    server.make_bucket("bucket")
    server.answer = lambda method, path: 503 if method == "PUT" else None
    os.environ |= server.environment
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from xml.etree import ElementTree

_CODES = {403: "AccessDenied", 404: "NoSuchBucket", 500: "InternalError", 503: "SlowDown"}
_SPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class FaultyS3:
    """moto's, in threads of this process. Closed at the end of a with statement."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._service = DomainDispatcherApplication(create_backend_app)
        #: Of a request that is not to be served: the status in its place; else None.
        self.answer: Callable[[str, str], int | None] = lambda method, path: None
        #: Seconds that each request waits ahead of it.
        self.delay: Callable[[str, str], float] = lambda method, path: 0.0
        #: Method and path of all of them.
        self.requests: list[tuple[str, str]] = []
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", f"/{name}")

    def objects(self, bucket: str, prefix: str = "") -> list[str]:
        """Names of all objects behind the prefix."""
        text = self._ask("GET", f"/{bucket}?list-type=2&max-keys=1000&prefix={prefix}")
        names = [key.text for key in ElementTree.fromstring(text).iter(f"{_SPACE}Key")]
        return sorted(name.removeprefix(prefix) for name in names)

    def read(self, bucket: str, name: str) -> bytes:
        return self._ask("GET", f"/{bucket}/{name}")

    def write(self, bucket: str, name: str, content: bytes) -> None:
        self._ask("PUT", f"/{bucket}/{name}", content)

    def __enter__(self) -> FaultyS3:
        self._thread.start()
        self._ask("POST", "/moto-api/reset")  # all servers of a process have one state
        return self

    def __exit__(self, *what) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        # The faults are those of others.
        key = "AWS4-HMAC-SHA256 Credential=testing/20200101/us-east-1/s3/aws4_request, Signature=0"
        kind = "application/octet-stream"
        headers = {"Authorization": key, "X-Test": "1", "Content-Type": kind}
        request = urllib.request.Request(
            self.url + path, data=content, method=method, headers=headers
        )
        for is_last in (False, False, True):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.read()
            except urllib.error.HTTPError as error:
                # The service lists objects while another of its threads adds one.
                if error.code != 500 or is_last:
                    raise

    def _serve(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        status = None
        if "HTTP_X_TEST" not in environ:
            self.requests.append((method, path))
            time.sleep(self.delay(method, path))
            status = self.answer(method, path)
        if status is None:
            return self._service(environ, start_response)
        _drain(environ)
        code = _CODES.get(status, "InternalError")
        body = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(f"{status} {code}", headers)
        return [body if method != "HEAD" else b""]


def _drain(environ) -> None:
    left = int(environ.get("CONTENT_LENGTH") or 0)
    while left > 0 and (part := environ["wsgi.input"].read(min(left, 1 << 20))):
        left -= len(part)
