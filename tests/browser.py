"""A real browser that opens a file and says what became of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the path: make browser installs Debian's"
)


def opened(page: Path, fragment: str, profile: Path) -> BeautifulSoup:
    """The document once its scripts have run; `profile` is a folder of the browser's own."""
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    done = subprocess.run(
        [
            CHROMIUM,
            *options,
            f"--user-data-dir={profile}",
            "--virtual-time-budget=1000",
            "--dump-dom",
            f"{page.as_uri()}#{fragment}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return BeautifulSoup(done.stdout, "html.parser")
