"""Prepare a store for a vLLM server: `python -m coinrag_integrations.serving STORE`.

Writes down what the server has to know without loading the model, says how to start it, and with
`--model` saves the model that answers: the store's own, with its reader adapter merged in. `--request`
prepares the beginning of a stock client's requests.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from coinrag_integrations.engine import Engine
from coinrag_integrations.errors import CoinRAGError, ConfigError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.serving.launch import server_command
from coinrag_integrations.serving.marked import head_of_request
from coinrag_integrations.serving.prepared import prepare, save_reader


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if it cannot be done, after saying why."""
    parser = argparse.ArgumentParser(
        prog="python -m coinrag_integrations.serving", description="Prepare a store for vLLM."
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--collection", default="main")
    parser.add_argument("--model", type=Path, help="a folder to save the answering model in")
    parser.add_argument(
        "--request",
        type=Path,
        action="append",
        default=[],
        help="a file with a request as a stock client sends it (JSON): its beginning is prepared",
    )
    options = parser.parse_args(arguments)
    try:
        with CoinRAG.open(
            options.store, tenant=options.tenant, collection=options.collection
        ) as rag:
            prepare(rag.engine, [_head(rag.engine, path) for path in options.request])
            model = options.model or rag.engine.model.name
            if options.model is not None:
                save_reader(rag.engine, options.model)
            elif rag.engine.reader.adapter is not None:
                model = "MODEL"
                sys.stderr.write("answers use a reader adapter: --model MODEL saves it merged\n")
            dtype = rag.engine.fingerprint.dtype
            command = server_command(model, options.store, 8000, ["--dtype", dtype])
    except CoinRAGError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{shlex.join(command)}\n")
    return 0


def _head(engine: Engine, path: Path) -> tuple[int, ...]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a request: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(
            f"{path} holds no request: it must be an object with messages or a prompt"
        )
    return head_of_request(engine.model.tokenizer, engine.handles, body)


if __name__ == "__main__":
    raise SystemExit(main())
