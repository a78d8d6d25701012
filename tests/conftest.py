"""Around every test: nothing may be left behind; at the end: what was left out."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import backend_kit
import leak_kit
import numpy as np
import pytest
import ray_kit
import torch

from swath.testing import CountingEnv

OPTIONAL = {
    "torchrl": [
        "policies/test_torchrl_policies.py",
        "envs/test_torchrl_values.py",
        "envs/test_torchrl_forms.py",
    ],
    "minari": ["data/test_minari.py"],
    "jax": [],
    "envpool": [],
    "ale_py": [],
    "submitit": [],
    "matplotlib": [],
    "h5py": [],
}
"""Packages that need not be there, as on other platforms, and test files that import them."""

_missing = {name for name in OPTIONAL if importlib.util.find_spec(name) is None}
collect_ignore = [file for name in _missing for file in OPTIONAL[name]]

torch.set_num_threads(1)
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # the driver keeps descriptors for whoever uses it first
# On a machine with many cores torch would keep a process that compiles beside this one.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell script that starts tests with `&` has Ctrl-C ignored in them, and in all their
    # children. What tests of Ctrl-C say must not depend on how they were started.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# -- backends -------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the ranks of `mpirun` run tests over MPI."""
    parser.addoption("--backend", help="run only tests that have backends, over this one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `backend` over all that its `over` names."""
    if "backend" in metafunc.fixturenames:
        only = metafunc.config.getoption("backend")
        metafunc.parametrize(
            "backend", backend_kit.params(metafunc.definition, only), indirect=True
        )


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> backend_kit.Backend:
    """Return what makes collectors with workers, over one way in which these can be reached."""
    if request.param.startswith("ray"):
        request.getfixturevalue("cluster")
    if request.param == "ray-far":
        request.getfixturevalue("far")
    return backend_kit.Backend(request.param)


@pytest.fixture(scope="session")
def torch_keeps_its_last_agent() -> None:
    """Torch frees most of what an RPC agent had when the next one starts; it counts as no leak."""
    for _ in range(2):
        with backend_kit.Backend("rpc").sync([CountingEnv] * 4, frames_per_batch=8) as one:
            assert one.next().numel() == 8


# -- Ray ------------------------------------------------------------------------------------------


@pytest.fixture
def cluster():
    """Return Ray, with the one cluster that this process starts for all its tests."""
    return ray_kit.cluster()


@pytest.fixture
def no_cluster() -> None:
    """Leave the cluster of this process, if it has one; the next test that needs one starts it."""
    ray_kit.leave()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no actor come in by a door, as if all were on other machines."""
    ray_kit.lead_nowhere(monkeypatch)


@pytest.fixture(params=["near", "far"])
def anywhere(request: pytest.FixtureRequest) -> None:
    """Run a test with actors that come in by a door, and with actors that do not."""
    if request.param == "far":
        request.getfixturevalue("far")


# -- what is left ---------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at what was imported and collected as tests again.

    The check around each test collects garbage while it waits; most of that time went into modules.
    """
    gc.collect()
    gc.freeze()


def _backend_of(item: pytest.Item) -> str:
    """Return the backend of a test; nothing if it has none, or none that was asked for."""
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    return backend if isinstance(backend, str) else ""


def _uses_ray(item: pytest.Item) -> bool:
    named = "cluster" in getattr(item, "fixturenames", ())
    return named or "ray" in item.path.parts or _backend_of(item).startswith("ray")


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail on left-over processes, threads, shared memory and descriptors."""
    if _backend_of(request.node) == "rpc":  # before anything is counted
        request.getfixturevalue("torch_keeps_its_last_agent")
    before = leak_kit.OfOurs() if _uses_ray(request.node) else leak_kit.Everything()
    yield
    if request.node.get_closest_marker("slow") or request.node.get_closest_marker("gpu"):
        return  # the compiler keeps its own workers, and the driver its own descriptors
    left = leak_kit.wait_until_clean(before)
    assert not left, "a test left something behind"


@pytest.fixture(autouse=True)
def untouched_surroundings() -> Iterator[None]:
    """Fail when a test changes the learner's thread count or grad mode."""
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skip a test that imports an optional package where that is not installed."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in _missing:
            pytest.skip(f"{name} is not installed")
        raise


# -- what was not run -----------------------------------------------------------------------------

LEFT_OUT = pytest.StashKey[Counter[str]]()
HOW_TO_RUN = {
    "cluster": "long suites over gloo, RPC, MPI, Slurm and Ray: make test-all",
    "gpu": "for a CUDA device: python -m pytest -m gpu where there is one",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what says nothing new or cannot run here."""
    items[:] = [item for item in items if not _is_said_twice(item)]
    if not torch.cuda.is_available():
        on_gpus = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpus)
    for item in items:
        if _uses_ray(item) and not ray_kit.INSTALLED:
            item.add_marker(pytest.mark.skip(reason="needs Ray: pip install swath[ray]"))


def _is_said_twice(item: pytest.Item) -> bool:
    """Tell whether a test is that of one worker beside, which only processes have a class for."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("kind") == "beside" and params.get("backend", "processes") != "processes"


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what is left out, by the marker that says what it needs."""
    for item in items:
        for name in HOW_TO_RUN:
            if item.get_closest_marker(name):
                item.config.stash.setdefault(LEFT_OUT, Counter())[name] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the cluster of this process; tell the first process what this one left out."""
    ray_kit.close()
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
        left_out = session.config.stash.get(LEFT_OUT, Counter())
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of pytest-xdist left out; it is the same in all of them."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    for name, count in config.stash.get(LEFT_OUT, Counter()).items():
        terminalreporter.line(f"left out: {count} tests, {HOW_TO_RUN[name]}")
