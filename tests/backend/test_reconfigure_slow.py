"""``reconfigure`` where a name server is slow, which torch asks at every connection."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReconfigureOptions

from weightsync import testing
from weightsync.backend import create_nccl

COMPILER: Final = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]

LIMIT: Final = timedelta(seconds=30)

SLOW: Final = """
#include <dlfcn.h>
#include <netdb.h>
#include <unistd.h>

extern "C" int getnameinfo(const sockaddr* address, socklen_t size, char* host,
                           socklen_t host_size, char* port, socklen_t port_size,
                           int flags) {
  using Function = decltype(&getnameinfo);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getnameinfo"));
  if ((flags & NI_NUMERICHOST) == 0) usleep(1050000);
  return real(address, size, host, host_size, port, port_size, flags);
}
"""
"""A name server that takes longer than the first attempt to connect may."""


def meet() -> None:
    """Form a group of one member, which meets itself at its store."""
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = create_nccl(store, enable_reconfigure=True)
    options = ReconfigureOptions()
    options.uuid, options.timeout = 1, LIMIT
    options.handles = [group.get_reconfigure_handle()]
    group.reconfigure(options).wait()
    print("members:", group.size())
    group.abort()


def test_members_meet_where_a_name_server_is_slow(tmp_path: Path) -> None:
    assert COMPILER is not None
    library = tmp_path / "slow.so"
    source = library.with_suffix(".cpp")
    source.write_text(SLOW)
    command = [COMPILER, "-shared", "-fPIC", source, "-o", library, "-ldl"]
    subprocess.run(command, check=True, timeout=30)
    variables = testing.environment(gpus=1)
    variables["LD_PRELOAD"] = f"{variables['LD_PRELOAD']}:{library}"
    program = f"from {__name__} import meet; meet()"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=50,
        check=True,
    )

    assert "members: 1\n" in ended.stdout
