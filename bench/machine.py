"""Facts about the machine and the versions, to read beside the numbers."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "swath",
    "torch",
    "torchrl",
    "tensordict",
    "gymnasium",
    "ray",
    "stable-baselines3",
    "numpy",
)


def facts() -> dict:
    """What the results depend on."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch_threads": 1,
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
