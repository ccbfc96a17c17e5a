"""The crash test, with the machine dying: what was written and not synced is lost with the process.

Files that were changed since their last fsync get the bytes they had then; names that were given or taken
stay as they are, as on a file system that journals its directories.
"""

from __future__ import annotations

from typing import Any

from tests.faults import Scale, crash


def run(scale: Scale) -> dict[str, Any]:
    """Lose power at points spread over the workload: `power_points`, documents lost, documents wrong."""
    figures = crash.run(scale, power=True)
    return {
        "power_points": figures["crash_points"],
        "power_lost": figures["lost"],
        "power_wrong": figures["wrong"],
    }
