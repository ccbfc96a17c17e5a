"""Composed prefixes inside a vLLM server, and the client that asks such a server.

Only `connector` imports vllm, and it is named to the server as a module: nothing here imports it.
"""

from __future__ import annotations

from coinrag_integrations.serving.client import ServedModel, ServedStream
from coinrag_integrations.serving.prepared import prepare

__all__ = ["ServedModel", "ServedStream", "prepare"]
