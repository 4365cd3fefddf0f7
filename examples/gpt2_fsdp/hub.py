"""Files of the Hugging Face hub: from its cache on this machine, else from the network.

path = fetch("openai-community/gpt2", "config.json")
"""

import os
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit


class HubError(Exception):
    """The file cannot be had; the message says why in one line."""


def fetch(repository: str, file: str) -> Path:
    """Where the file is on this machine. Raises: HubError."""
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError as error:
        raise HubError("huggingface_hub is not installed (pip install 'libddp[gpt2]')") from error
    try:
        return Path(hf_hub_download(repository, file, local_files_only=True))
    except Exception:
        pass
    _look_up(constants.ENDPOINT)
    try:
        return Path(hf_hub_download(repository, file, etag_timeout=10))
    except Exception as error:  # the hub's client raises whatever its HTTP library does
        raise HubError((str(error) or type(error).__name__).splitlines()[0]) from error


def _look_up(endpoint: str) -> None:
    """The client tries for half a minute to reach a host that has no address; we ask first."""
    if os.environ.get("HF_HUB_OFFLINE") or "https" in urllib.request.getproxies():
        return  # the client, or a proxy, knows by itself
    host = urlsplit(endpoint).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise HubError(f"not in the cache, and {host} cannot be reached from here") from error
