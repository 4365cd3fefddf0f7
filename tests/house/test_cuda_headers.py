"""What libddp includes of CUDA and NCCL is there once torch is installed: no toolkit is needed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tree import ROOT

SITE = Path(torch.__file__).resolve().parents[1]
#: Where libddp/cmake/Cuda.cmake looks beside torch, in its order.
FOLDERS = ["nvidia/nccl/include", "nvidia/cu*/include", "triton/backends/nvidia/include"]


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@pytest.mark.parametrize("header", ["libddp/cuda/nccl_header.h", "cuda_runtime_api.h"])
def test_headers_come_with_torch(header):
    folders = [found for pattern in FOLDERS for found in sorted(SITE.glob(pattern))]
    compiler = shutil.which("g++") or shutil.which("c++")
    command = [compiler, "-std=c++20", "-x", "c++", "-M", "-", f"-I{ROOT}"]
    for folder in folders:
        command += ["-isystem", str(folder)]
    ended = subprocess.run(command, input=f"#include <{header}>", capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    read = [Path(word) for word in ended.stdout.split() if word.endswith(".h")]
    assert any(SITE in path.parents for path in read)
    # A toolkit, or what one has left in a folder of the system.
    strange = [path for path in read if re.search("cuda|crt/|nccl|/nv/", str(path))]
    assert [p for p in strange if not {SITE, ROOT} & set(p.resolve().parents)] == []
