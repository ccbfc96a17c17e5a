"""Prepare a store for a vLLM server: `python -m coinrag_integrations.serving STORE`.

Writes down what the server has to know without loading the model, says how to start it, and with
`--model` saves the model that answers: the store's own, with its reader adapter merged in.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from coinrag_integrations.errors import CoinRAGError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.serving.launch import server_command
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
    options = parser.parse_args(arguments)
    try:
        with CoinRAG.open(
            options.store, tenant=options.tenant, collection=options.collection
        ) as rag:
            prepare(rag.engine)
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


if __name__ == "__main__":
    raise SystemExit(main())
