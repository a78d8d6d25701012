"""The command line: `swath collect`, `swath info` and `swath bench`.

What is heavy to import (torch, gymnasium) is imported by the command that needs it, so that
`swath --help` answers at once. Ctrl-C while frames are collected ends the rollout there and then,
and its whole steps are kept; otherwise it waits for what is being stored. The second one does not.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import os
import signal
import subprocess
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import swath
from swath.errors import DamagedFileError, SwathError, UsageError, nearest
from swath.system import usable_cpus

if TYPE_CHECKING:
    from swath.collectors import BaseCollector
    from swath.data import DatasetWriter
    from swath.envs import Env

__all__ = ["app", "main"]

# What a shell reports for a process that SIGINT or SIGTERM has ended.
_INTERRUPTED, _TERMINATED = 130, 143
_BATCH = 2048  # frames, about
# Click's own base of all usage errors; newer versions of typer carry a click of their own.
_BadUsage: Any = typer.BadParameter.__base__

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Collect experience for reinforcement learning in PyTorch.",
)
_out, _err = Console(), Console(stderr=True)


class Format(str, enum.Enum):
    """How data is stored."""

    tensordict = "tensordict"
    minari = "minari"


class Mode(str, enum.Enum):
    """How workers deliver: all together, or each when it is done."""

    sync = "sync"
    asynchronous = "async"


class Backend(str, enum.Enum):
    """Where workers run."""

    processes = "processes"
    ray = "ray"


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


def _count(text: str, least: int) -> Any:
    """Return an option that is a whole number, also written as 1e5 or 100_000."""

    def parse(value: Any) -> int:
        for kind in (int, float):  # large seeds are no floats
            with contextlib.suppress(ValueError):
                number = kind(str(value))
                if number >= least and number % 1 == 0:
                    return int(number)
        wanted = f"a whole number of at least {least}, such as 1000 or 1e3"
        raise typer.BadParameter(f"{value!r} is not {wanted}.")

    return typer.Option(metavar="N", help=text, parser=parse)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say_error(f"warning: {message}")
        try:
            return app(given or ["--help"], prog_name="swath", standalone_mode=False) or 0
        except _BadUsage as error:
            _say_error(f"error: {error.format_message()}")
        except (SwathError, OSError, ImportError) as error:
            _say_error(f"error: {_explained(error)}")
        except (KeyboardInterrupt, typer.Abort):
            return _INTERRUPTED
        return 2


@app.callback(invoke_without_command=True)
def _swath(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(f"swath {swath.__version__}")
        raise typer.Exit


@app.command()
def collect(  # noqa: PLR0913 - one parameter per option
    env: Annotated[
        str,
        typer.Argument(metavar="ENV", help="Gymnasium id, such as CartPole-v1 or module:Id-v0."),
    ],
    frames: Annotated[int, _count("Number of frames to collect, over all envs.", 1)] = 200_000,
    envs: Annotated[int, _count("Number of envs.", 1)] = 8,
    policy: Annotated[
        str | None, _option("MODULE:NAME", "The policy (see above); by default actions are random.")
    ] = None,
    seed: Annotated[
        int | None, _count("Seed of the envs, the actions and the first weights.", 0)
    ] = None,
    max_frames_per_traj: Annotated[
        int | None, _count("Truncate trajectories after N frames.", 1)
    ] = None,
    out: Annotated[
        Path | None,
        _option("DIR", "Store the frames in this directory, which must be new or empty."),
    ] = None,
    format: Annotated[Format, typer.Option(help="Format of the stored data.")] = Format.tensordict,
    workers: Annotated[
        int, _count("Number of worker processes; 0 collects in this process.", 0)
    ] = 0,
    mode: Annotated[
        Mode,
        typer.Option(
            help="sync: wait for all workers; async: take the rollout of the worker that is done "
            "first."
        ),
    ] = Mode.sync,
    backend: Annotated[
        Backend, typer.Option(help="Run workers as processes, or on a Ray cluster.")
    ] = Backend.processes,
    address: Annotated[
        str | None,
        _option("HOST:PORT", "Ray cluster to use; by default one is started locally."),
    ] = None,
) -> int:
    """Collect frames from an env and print a summary.

    --policy names an object in a module that can be imported from the current
    directory. If the object is an nn.Module, or a function of one argument (the
    observations of all envs), it is the policy. If it is a function of
    (observation_space, action_space), or of no arguments, it is called and must
    return the policy.

    Example: swath collect CartPole-v1 --policy my_policies:make --out data
    """
    if format is Format.minari and out is None:
        raise UsageError("--format minari needs a directory for the data; add --out DIR.")
    if address is not None and backend is not Backend.ray:
        raise UsageError(f"--address {address} needs --backend ray.")
    if backend is Backend.ray and not workers:
        workers = min(envs, usable_cpus())
    if mode is Mode.asynchronous and not workers:
        raise UsageError("--mode async needs worker processes; add --workers N.")
    if workers > envs:
        raise UsageError(f"--workers {workers} is more than the {envs} envs; each needs one.")
    sys.path.insert(0, os.getcwd())  # policies and 'module:Id-v0' envs live where the user is
    with contextlib.ExitStack() as stack:
        stack.push(_say_if_interrupted)
        from swath.data import DatasetWriter, MinariWriter
        from swath.envs import SerialEnv

        made, name = SerialEnv(envs, env), policy or "random"
        writer: DatasetWriter | None = None
        ended = _ended_by_sigterm(stack)
        if out is not None:
            if format is Format.minari:
                writer = MinariWriter(out, env=made.group.envs[0], policy=name)  # type: ignore[attr-defined]
            else:
                writer = DatasetWriter(out, env_id=env, seed=seed, policy=name)
            stack.callback(writer.discard)  # nothing, once it is closed
        options = {
            "total_frames": frames,
            "max_frames_per_traj": max_frames_per_traj,
            "seed": seed,
        }
        chosen = _make_policy(policy, made, seed)
        where = {"address": address} if backend is Backend.ray else None
        collector = _make_collector(env, made, chosen, workers, mode, options, where)
        stack.callback(collector.shutdown)
        run = _Run(collector, writer)
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, run.interrupt))
        run.go(frames)
        who = "actors" if backend is Backend.ray else "workers"
        by = f" in {workers} {who}" if workers else ""
        run.report(f"{env}, {name} policy", f"of {frames:,}, from {envs} envs{by}")
    if run.failure is not None:
        raise run.failure
    return (_TERMINATED if ended() else _INTERRUPTED) if run.interrupted else 0


def _say_if_interrupted(kind: type[BaseException] | None, *_: object) -> None:
    """Say so if Ctrl-C comes before there is anything to sum up; typer only ends."""
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        _say_error("interrupted")


def _ended_by_sigterm(stack: contextlib.ExitStack) -> Callable[[], bool]:
    """Let SIGTERM end the collection as Ctrl-C does; return what tells whether it has come.

    Batch systems send it when the time of a job is over.
    """
    came = []

    def interrupt(*_: Any) -> None:
        came.append(True)
        # Whoever holds Ctrl-C back at the moment holds this back, too.
        signal.raise_signal(signal.SIGINT)

    stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, interrupt))
    return lambda: bool(came)


def _make_collector(
    env_id: str,
    made: Any,
    policy: Any,
    workers: int,
    mode: Mode,
    options: dict[str, Any],
    on_ray: dict[str, Any] | None,
) -> BaseCollector:
    """Return the collector that the options ask for; workers make their own envs."""
    from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from swath.collectors.distributed import RayCollector

    on_a_cluster: Any = RayCollector

    envs = made.num_envs
    if not workers:
        return Collector(made, policy, frames_per_batch=envs * max(1, _BATCH // envs), **options)
    made.close()
    bounds = [envs * number // workers for number in range(workers + 1)]
    sources = [[env_id] * (stop - start) for start, stop in pairwise(bounds)]
    all_frames = envs * max(1, _BATCH // envs)
    each = [len(source) * max(1, _BATCH // envs) for source in sources]
    if mode is Mode.sync:
        options |= {"frames_per_batch": all_frames, "cat_results": 0}
    else:
        options |= {"frames_per_batch": each}
    if on_ray is not None:
        return on_a_cluster(sources, policy, sync=mode is Mode.sync, **on_ray, **options)
    kind: Any = MultiSyncCollector if mode is Mode.sync else MultiAsyncCollector
    return kind(sources, policy, **options)


@app.command()
def info(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a dataset or a replay buffer.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare all files with their checksums.")
    ] = False,
) -> int:
    """Describe a dataset: frames, keys, episodes.

    DIR was written by swath collect --out, in either format, or is the
    directory of a ReplayBuffer. With --verify, swath names the first file
    that was changed after it was written, and the exit code is 1.
    """
    from swath.data import describe
    from swath.data.datasets import verify_dataset

    try:
        verified = verify_dataset(directory) if verify else None
    except DamagedFileError as error:
        _say_error(f"error: {error}")
        return 1
    found = describe(directory)
    table = Table(title=str(directory), show_header=False)
    room = f" of {found['capacity']:,}" if found["capacity"] is not None else ""
    table.add_row("frames", f"{found['frames']:,}{room}, {found['bytes'] / 1e6:,.1f} MB")
    for name, value in found["about"].items():
        table.add_row(name, str(value))
    table.add_row(
        "trajectories", f"{found['trajectories']:,}, of which {found['episodes']:,} ended"
    )
    _add_episodes(table, found)
    for name, (dtype, shape) in found["keys"].items():
        table.add_row(name, f"{dtype} {shape}")
    _out.print(table, highlight=False)
    if verified is not None:
        as_written = "all files are unchanged"
        _say(
            f"checksums: {as_written if verified else 'none stored; all files have the right size'}"
        )
    return 0


@app.command()
def recover(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory that --out named, or DIR.partial.")
    ],
) -> int:
    """Turn the frames that a killed run left in DIR.partial into a dataset."""
    from swath.data import recover_dataset

    frames = recover_dataset(directory)
    path = directory.with_name(directory.name.removesuffix(".partial")).absolute()
    _say(f"frames: {frames:,}\ndata: {path}\nload: swath.data.load_dataset({str(path)!r})")
    return 0


def _add_episodes(table: Table, stats: dict[str, Any]) -> None:
    for name in ("return", "length"):
        values = stats[name] or {}
        parts = [f"{key.replace('_', ' ')} {value:,.1f}" for key, value in values.items()]
        table.add_row(name, "  ".join(parts) or "no episode has ended")


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Run a short smoke test.")] = False,
) -> int:
    """Compare the speed of swath with that of other libraries; needs a source checkout."""
    near = (Path(__file__).parents[2], Path.cwd())
    roots = [p for p in near if (p / "bench/__main__.py").exists() and (p / "src/swath").is_dir()]
    if not roots:
        raise UsageError(
            "the benchmarks are not part of the installed package: run this in a source checkout "
            "of swath, where the folder bench/ is."
        )
    command = [sys.executable, "-m", "bench", *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=roots[0], check=False).returncode


class _Run:
    """One collection: what it gave and where its time went."""

    def __init__(self, collector: BaseCollector, writer: DatasetWriter | None) -> None:
        self._collector, self._writer = collector, writer
        self.failure: Exception | None = None
        self.interrupted = self._collecting = False
        self._seconds = self._writing = 0.0

    def go(self, frames: int) -> None:
        """Collect and write until all is there, Ctrl-C or a failure; then finish the dataset."""
        from swath.observe.progress import Bar

        bar = Bar(frames)
        started = perf_counter()
        try:
            while not self.interrupted:
                bar.update(self._collector.stats)
                self._collecting = True
                batch = self._collector.next()
                self._collecting = False
                if batch is None:
                    break
                self._write(batch)
        except KeyboardInterrupt:
            self.interrupted = True
        except (SwathError, OSError) as error:
            self.failure = error
        finally:
            self._collecting = False
            if _err.is_terminal:  # in a log the summary is the last line
                bar.close()
        while (left := self._collector.partial()) is not None:  # whole steps of broken rollouts
            self._write(left)
        self._seconds = perf_counter() - started
        if self._writer is not None and self._writer.frames:
            self._writer.close()

    def interrupt(self, *_: Any) -> None:
        """Answer SIGINT: at once while frames are collected, or when it comes again."""
        again, self.interrupted = self.interrupted, True
        if again or self._collecting:
            raise KeyboardInterrupt

    def _write(self, batch: Any) -> None:
        if self._writer is not None and batch is not None:
            started = perf_counter()
            self._writer.write(batch)
            self._writing += perf_counter() - started

    def report(self, title: str, wanted: str) -> None:
        """Print the summary, and where the data is; nothing if a failure came before the data."""
        stats, writer = self._collector.stats(), self._writer
        if self.failure is not None and not stats["frames"]:
            return
        table = Table(title=title, show_header=False)
        table.add_row("frames", f"{stats['frames']:,} {wanted}")
        table.add_row("frames/s", f"{stats['frames'] / self._seconds:,.0f}")
        table.add_row("episodes", f"{stats['episodes']:,}")
        _add_episodes(table, stats)
        writing = self._writing / self._seconds  # the collector knows only of its own time
        shares = {name: share * (1 - writing) for name, share in stats["time"].items()}
        parts = [f"{name} {share:.0%}" for name, share in [*shares.items(), ("writing", writing)]]
        time = f"{self._seconds:,.1f} s"
        if any(shares.values()):  # not if it broke off in the first steps
            time += ": " + ", ".join(parts)
        table.add_row("time", time)
        _out.print(table, highlight=False)
        if self.interrupted:
            _say("interrupted: this is the summary of the frames collected so far")
        if writer is None:
            _say("data: not stored; --out DIR stores it")
        elif not writer.frames:
            _say("data: no frames, so nothing was stored")
        else:
            _say(f"data: {writer.directory}\nload: {writer.load_call}")


def _make_policy(reference: str | None, env: Env, seed: int | None) -> Any:
    """Return the policy that `--policy` names; the rule is in the help of `collect`."""
    if reference is None:
        return None
    import torch

    try:
        found = _imported(reference)
        if isinstance(found, torch.nn.Module):
            return found
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            return _called(found, env)
    except UsageError as error:
        raise UsageError(f"--policy {reference!r}: {error}") from None
    except Exception as error:  # whatever the user's code raises
        text = f"--policy {reference!r} raised {type(error).__name__}: {error}"
        raise UsageError(text) from error


def _imported(reference: str) -> Any:
    name, _, path = reference.partition(":")
    if not (name and path):
        raise UsageError("expected the form module:name, such as my_policies:make.")
    module = importlib.import_module(name)
    if not hasattr(module, path):
        hint = nearest(path, [n for n in vars(module) if not n.startswith("_")])
        raise UsageError(f"the module {name!r} has no {path!r}.{hint}")
    return getattr(module, path)


def _called(found: Any, env: Env) -> Any:
    """Return what a maker of policies returns; a function of the observation as it is."""
    parameters = inspect.signature(found).parameters.values() if callable(found) else ()
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = sum(p.default is p.empty and p.kind not in packed for p in parameters)
    if needed == 1 and not isinstance(found, type):
        return found
    if needed not in (0, 2) or not callable(found):
        what = f"needs {needed} arguments" if callable(found) else "cannot be called"
        raise UsageError(
            f"{type(found).__name__} {what}; expected a function of (observation_space, "
            "action_space) or of nothing that returns the policy, a function of the observation, "
            "or an nn.Module."
        )
    made = found(env.observation_space, env.action_space) if needed else found()
    if made is None:
        raise UsageError("the function returned None; it must return the policy.")
    return made


def _say(text: str, console: Console = _out) -> None:
    """Print text as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _say_error(text: str) -> None:
    """Print one line on stderr."""
    _say(" ".join(Text.from_ansi(f"swath: {text}").plain.split()), _err)


def _explained(error: BaseException) -> str:
    """Return the message of an error, and the line of the user's code that it comes from."""
    text = str(error).replace("; see the cause above", "")
    if not isinstance(error, SwathError) or error.__cause__ is None:
        return text
    others = ("<", str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib")))
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text


if __name__ == "__main__":
    sys.exit(main())
