"""Run the fault suite, or parts of it by name; the last line of stdout is one JSON object.

    python -m tests.faults                     everything, at full scale: tens of minutes
    python -m tests.faults --short crash flips

Every part runs in a process of its own. Ends with 1 if anything was lost, wrong or not detected.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from tests.faults import Scale

PARTS = ("crash", "power", "flips", "fuzz", "readers", "cap", "codec")
# Figures that must be 0.
FAULTS = (
    *("lost", "wrong", "power_lost", "power_wrong"),
    *(f"{part}_failed" for part in PARTS),
    *("undetected", "escaped", "readers_wrong", "cap_exceeded"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for; 1 if a figure that must be 0 is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--short", action="store_true", help="what pytest runs: about a minute")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: use {', '.join(PARTS)}")
    scale: Scale = "short" if asked.short else "full"
    names = asked.parts or PARTS
    if len(names) == 1:
        figures = import_module(f"tests.faults.{names[0]}").run(scale)
    else:
        figures = {}
        for name in names:
            figures |= _apart(name, scale)
    print(json.dumps(figures))  # noqa: T201
    return int(any(figures.get(name) for name in FAULTS))


def _apart(part: str, scale: Scale) -> dict[str, Any]:
    """The figures of a part, run in a process of its own: most of them fork, and must have no threads."""
    console, started = Console(stderr=True), time.monotonic()
    if find_spec(f"tests.faults.{part}") is None:
        console.print(f"{part}: not there")
        return {}
    command = [
        sys.executable,
        "-m",
        "tests.faults",
        part,
        *(["--short"] if scale == "short" else []),
    ]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    figures: dict[str, Any] = json.loads(said[-1]) if said else {f"{part}_failed": 1}
    console.print(f"{part}: {figures}, {time.monotonic() - started:.0f} s", soft_wrap=True)
    return figures


if __name__ == "__main__":
    sys.exit(main())
