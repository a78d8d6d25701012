"""What users see: names, docs that run, imports that cost nothing."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import swath
from swath import collectors
from swath.collectors import (
    Collector,
    DataCollectorBase,
    MultiSyncCollector,
    Options,
    SyncDataCollector,
)
from swath.collectors.base import BaseCollector
from swath.collectors.distributed import DistributedCollector
from swath.collectors.documented import texts

ROOT = Path(__file__).parent.parent
PACKAGES = ["collectors", "collectors.utils", "envs", "policies", "data", "testing", "errors"]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_sorted_and_complete(name):
    module = importlib.import_module(f"swath.{name}")
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public).__doc__, f"swath.{name}.{public} has no docstring"


def test_old_names_are_the_same_classes():
    assert SyncDataCollector is Collector
    assert DataCollectorBase is BaseCollector
    assert collectors.MultiSyncDataCollector is MultiSyncCollector
    assert collectors.MultiaSyncDataCollector is collectors.MultiAsyncCollector
    assert collectors.aSyncDataCollector is collectors.AsyncCollector


def test_the_package_says_that_it_is_typed_and_what_version_it_is():
    assert (Path(swath.__file__).parent / "py.typed").exists()
    assert re.fullmatch(r"\d+\.\d+.*", swath.__version__)
    assert swath.filter_warnings_subprocess is True


def test_help_shows_all_options_with_their_defaults():
    fields = Options.__dataclass_fields__.values()
    for kind, scope in (
        (Collector, "inline"),
        (MultiSyncCollector, "workers"),
        (DistributedCollector, "cluster"),
    ):
        parameters = list(inspect.signature(kind).parameters)
        own = [f.name for f in fields if scope in f.metadata.get("scopes", [scope])]
        assert parameters == ["create_env_fn", "policy", *own]
    assert len(own) > len(inspect.signature(Collector).parameters)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, DistributedCollector])
def test_help_has_the_text_of_every_option_and_the_rest_of_the_docstring(kind):
    text = inspect.getdoc(kind)
    for name in list(inspect.signature(kind).parameters)[2:]:
        assert texts()[name].endswith("."), f"{name} has no sentence"
        assert f"    {name}: " in text
    assert "The first n frames use random actions; `(" in text
    assert "**options" not in text
    assert text.index("Args:") < text.index("frames_per_batch:") < text.index("Examples:")


def test_a_subclass_without_a_docstring_has_none():
    class Own(DistributedCollector):
        pass

    assert Own.__doc__ is None
    assert "sync" in inspect.signature(Own).parameters


def test_nothing_optional_is_imported_before_it_is_used():
    code = (
        "import sys, swath.collectors, swath.envs, swath.policies, swath.data;"
        "print([m for m in ('torchrl', 'minari', 'ray', 'mpi4py', 'envpool', 'matplotlib', 'typer')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda p: p.name)
def test_examples_in_the_docs_run(page):
    results = doctest.testfile(str(page), module_relative=False)
    assert results.failed == 0


def test_the_example_in_the_readme_runs_and_stands_before_line_30():
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert text[: code.end()].count("\n") < 30
    scope: dict = {}
    exec(code.group(1).replace("10_000", "1_000"), scope)
    assert scope["data"].batch_size == (4, 50)
    assert scope["collector"].policy_version == 5


def test_a_script_without_main_guard_and_a_lambda_env_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium as gym\n"
        "from swath.collectors import SyncDataCollector\n"
        "collector = SyncDataCollector(\n"
        "    lambda: gym.make('CartPole-v1'), policy=None, frames_per_batch=50, total_frames=100)\n"
        "print(sum(data.numel() for data in collector))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "100", "")
