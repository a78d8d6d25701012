"""The command line: `swath collect` and `swath bench`.

Every error is one line on stderr with exit code 2. What is heavy to import (torch, gymnasium) is
imported by the command that needs it, so that `swath --help` answers at once.

Ctrl-C while frames are collected ends the rollout there and then, and its whole steps are kept;
while they are stored it waits for that; the second Ctrl-C waits for nothing.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import operator
import os
import signal
import subprocess
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import swath
from swath.errors import SwathError, UsageError, nearest

if TYPE_CHECKING:
    from swath.collectors import Collector
    from swath.data import DatasetWriter
    from swath.envs import Env
    from swath.observe.progress import Bar

__all__ = ["app", "main"]

_INTERRUPTED = 130  # what a shell reports for a process that SIGINT has ended
_BATCH = 2048
# Click's own base of all usage errors; newer versions of typer carry a click of their own.
_BadUsage: Any = typer.BadParameter.__base__
_COLLECT_HELP = (
    "Collect frames of an env, and say how it went.\n\n"
    "The policy comes from a module that can be imported from the current directory. A function "
    "of (observation_space, action_space), or of nothing, is called and returns it; a function of "
    "one argument, the observation, or an nn.Module is the policy itself.\n\n"
    "Example: swath collect CartPole-v1 --policy my_policies:make --out data"
)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Collect experience for reinforcement learning: envs and a policy in, TensorDicts out.",
)
_out, _err = Console(), Console(stderr=True)


class Format(str, enum.Enum):
    """How data is stored."""

    tensordict = "tensordict"
    minari = "minari"


def _count(text: str, least: int = 1) -> Any:
    return typer.Option(min=least, metavar="N", help=text)
