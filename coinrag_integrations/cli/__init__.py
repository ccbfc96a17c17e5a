"""The command `coinrag`. Every command takes `--json`: human text on stderr, one object on stdout."""

from __future__ import annotations

from coinrag_integrations.cli.main import app, main

__all__ = ["app", "main"]
