"""How a server is started, and what is said if it does not."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import import_module

import pytest
import torch

from coinrag_integrations.engine import EngineConfig, load_model, mark
from coinrag_integrations.errors import ServingError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.serving import launch
from coinrag_integrations.serving.__main__ import main
from coinrag_integrations.serving.config import ServingConfig
from coinrag_integrations.serving.prepared import Prepared
from coinrag_integrations.types import Document, Scope
from tests.tiny import TEXT, HashEmbedder, save_tiny

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_lives_as_long_as_its_block():
    port = launch.free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with launch.running(command, port, start_s=60) as address:
        assert address == f"http://127.0.0.1:{port}"
    silent = launch.running(
        [sys.executable, "-c", "import time; time.sleep(60)"], port, start_s=0.3
    )
    with pytest.raises(ServingError, match="does not answer after 0 s"), silent:
        pass


def test_a_server_that_ends_says_why(tmp_path):
    command = [sys.executable, "-c", "raise ValueError('no such store')"]
    log = tmp_path / "log"
    broken = launch.running(command, launch.free_port(), log=log)
    with pytest.raises(ServingError, match="status 1: ValueError: no such store"), broken:
        pass


def test_the_command_of_a_server(tmp_path):
    command = launch.server_command("model", tmp_path, 8000, ["--dtype", "float32"], scopes=["a.b"])
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_role"] == "kv_consumer"
    module, _, name = command[command.index("--middleware") + 1].rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)
    assert config["kv_connector_extra_config"] == {"store": str(tmp_path), "scopes": ["a.b"]}
    assert ServingConfig.parse(config["kv_connector_extra_config"]).scopes == (
        Scope(tenant="a", collection="b"),
    )


def test_a_store_is_prepared_by_a_command(tmp_path, capsys, monkeypatch):
    store, model = tmp_path / "store", save_tiny(tmp_path / "model")
    options = {"embedder": HashEmbedder(), "dtype": "float32", "config": EngineConfig()}
    with CoinRAG.open(store, model=model, **options) as rag:
        rag.add([Document(document_id="organ", text=TEXT)])
    open_ = CoinRAG.open
    monkeypatch.setattr(CoinRAG, "open", lambda *a, **o: open_(*a, embedder=HashEmbedder(), **o))
    assert main([str(store), "--model", str(tmp_path / "saved")]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[command.index("--model") + 1] == str(tmp_path / "saved")
    assert command[command.index("--dtype") + 1] == "float32"
    assert Prepared.open(store, Scope()).layout.dtype is torch.float32
    saved = load_model(tmp_path / "saved", dtype="float32")
    assert saved.weights == load_model(model, dtype="float32").weights


def test_a_request_of_a_stock_client_is_prepared_by_it(tmp_path, capsys, monkeypatch):
    store, model = tmp_path / "store", save_tiny(tmp_path / "model")
    options = {"embedder": HashEmbedder(), "dtype": "float32", "config": EngineConfig()}
    with CoinRAG.open(store, model=model, **options) as rag:
        rag.add([Document(document_id="organ", text=TEXT)])
        (chunk, *_), tokenizer = rag.engine.catalog.chunks(), rag.engine.model.tokenizer
        words = mark(rag.engine.handles.handle(chunk.ref()), chunk.text)
    open_ = CoinRAG.open
    monkeypatch.setattr(CoinRAG, "open", lambda *a, **o: open_(*a, embedder=HashEmbedder(), **o))
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"prompt": f"Read: {words} So"}))
    assert main([str(store), "--request", str(request)]) == 0
    head = (tokenizer.hf.bos_token_id, *tokenizer.encode("Read: ").ids)
    assert Prepared.open(store, Scope()).has_head(head)
    for content, said in (("{", "cannot be read"), ("[]", "no request"), ("{}", "no text")):
        request.write_text(content)
        assert main([str(store), "--request", str(request)]) == 1
        assert said in capsys.readouterr().err


def test_where_there_is_no_store_the_command_says_so(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "there is no store" in capsys.readouterr().err
