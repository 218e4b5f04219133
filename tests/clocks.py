"""Wall clocks that are wrong, or move, by libfaketime."""

from __future__ import annotations

import glob
from pathlib import Path


def faketime(seconds: float = 0.0, *, steps: Path | None = None) -> dict[str, str]:
    """Return the environment in which a wall clock is wrong by some seconds.

    With a file, ``step()`` moves the clock.
    """
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")  # noqa: PTH207
    if not found:
        raise FileNotFoundError(
            "libfaketime is not installed: apt-get install libfaketime"
        )
    common = {"LD_PRELOAD": found[0], "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    if steps is None:
        return {**common, "FAKETIME": f"{seconds:+.1f}"}
    step(steps, seconds)
    return {
        **common,
        "FAKETIME_TIMESTAMP_FILE": str(steps),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_RESET": "1",
    }


def step(steps: Path, seconds: float) -> None:
    """Let the clock be ahead by some seconds from now on."""
    # The file is replaced atomically, because a server reads it whenever it reads the
    # clock.
    new = steps.with_suffix(".new")
    new.write_text(f"{seconds:+.3f}")
    new.chmod(0o644)
    new.replace(steps)
