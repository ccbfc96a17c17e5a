"""A real Chroma server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until_it_answers(process: subprocess.Popen, port: int) -> None:
    for _ in range(300):
        assert process.poll() is None, "the server ended"
        try:
            httpx.get(f"http://127.0.0.1:{port}/api/v2/heartbeat").raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server does not answer")


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A real server in a process of its own: its address, and a way to end it."""
    port = free_port()
    program = Path(sys.executable).with_name("chroma")
    command = [program, "run", "--host", "127.0.0.1", "--port", str(port), "--path", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop() -> None:
        process.kill()
        process.wait()

    try:
        wait_until_it_answers(process, port)
        yield f"http://127.0.0.1:{port}", stop
    finally:
        stop()
