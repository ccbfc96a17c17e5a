"""The fault suite: break the store on purpose, and count what comes out wrong.

`python -m tests.faults` runs every part at full scale, `--short` what pytest runs. A part is a module
here with `run(scale) -> dict`: its figures, by the names of the report's JSON line.
"""

from __future__ import annotations

from typing import Literal

Scale = Literal["short", "full"]
