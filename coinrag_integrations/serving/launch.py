"""Start a vLLM server for a store: its command, and a process that lives as long as a block."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from coinrag_integrations.errors import ServingError

CONNECTOR = "CoinRAGConnector"
MODULE = "coinrag_integrations.serving.connector"
MIDDLEWARE = "coinrag_integrations.serving.middleware.CoinRAGMiddleware"


def transfer_config(store: str | Path, **options: Any) -> dict[str, Any]:
    """The value of `--kv-transfer-config`, and of the offline `LLM`'s `kv_transfer_config`.

    `options` are those of `ServingConfig`.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"store": str(store), **options},
    }


def server_command(
    model: str | Path, store: str | Path, port: int, arguments: Sequence[str] = (), **options: Any
) -> list[str]:
    """The command of a server on this machine, with further `arguments` of vLLM's.

    `model` is the folder of the model that the store was built with.
    """
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--kv-transfer-config", json.dumps(transfer_config(store, **options))),
        *("--middleware", MIDDLEWARE),
        "--enable-prompt-tokens-details",
        *arguments,
    ]


@contextmanager
def running(
    command: Sequence[str],
    port: int,
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    start_s: float = 600.0,
) -> Iterator[str]:
    """A server that ends with the block, and its address. What it says is written into `log`.

    Raises:
        ServingError: it ends, or does not answer within `start_s`.
    """
    address = f"http://127.0.0.1:{port}"
    with (log or Path(os.devnull)).open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # its own processes end with it
        )
    try:
        _wait(process, address, start_s, log)
        yield address
    finally:
        _end(process)


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], address: str, seconds: float, log: Path | None) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServingError(f"the server has ended with status {process.returncode}{_said(log)}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise ServingError(f"the server does not answer after {seconds:.0f} s{_said(log)}")


def _said(log: Path | None) -> str:
    """The last errors in a log."""
    if log is None:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line][-3:] or lines[-3:]
    return ": " + " | ".join(errors)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all of its processes: kindly first."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)
