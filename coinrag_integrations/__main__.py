"""`python -m coinrag_integrations` is the command `coinrag`."""

from __future__ import annotations

from coinrag_integrations.cli import main

main()
