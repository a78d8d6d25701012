"""The command line: `swath collect` and `swath bench`.

Every error is one line on stderr with exit code 2. What is heavy to import (torch, gymnasium) is
imported by the command that needs it, so that `swath --help` answers at once.

Ctrl-C while envs are stepped ends the rollout there and then, and its whole steps are kept; at any
other moment of a collection it waits for the batch; the second Ctrl-C waits for nothing.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import swath
from swath.errors import SwathError, UsageError, nearest

if TYPE_CHECKING:
    from swath.collectors import Collector
    from swath.data import DatasetWriter, MinariWriter
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
_out = Console()
_err = Console(stderr=True)


class Format(str, enum.Enum):
    """How data is stored."""

    tensordict = "tensordict"
    minari = "minari"


@dataclass(frozen=True)
class _Job:
    """What `swath collect` was asked to do."""

    env: str
    frames: int
    envs: int
    policy: str | None
    seed: int | None
    max_frames_per_traj: int | None
    frames_per_batch: int
    out: Path | None
    format: Format


# -- commands ---------------------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swath {swath.__version__}")
        raise typer.Exit


@app.callback()
def _swath(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None: ...


@app.command(help=_COLLECT_HELP)
def collect(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(metavar="ENV", help="Gymnasium id, also module:Id-v0.")],
    frames: Annotated[
        int, typer.Option(min=1, metavar="N", help="Frames to collect, over all envs.")
    ] = 200_000,
    envs: Annotated[int, typer.Option(min=1, metavar="N", help="Envs, stepped side by side.")] = 8,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="The policy, as said above; random actions by default.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Seeds envs, actions and the policy's weights."),
    ] = None,
    max_frames_per_traj: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Truncate trajectories at this length.")
    ] = None,
    frames_per_batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"Frames per batch; about {_BATCH} by default."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the data here; DIR must be new or empty."),
    ] = None,
    format: Annotated[Format, typer.Option(help="How to store it.")] = Format.tensordict,
) -> int:
    """Collect frames of an env, and say how it went."""
    if format is not Format.tensordict and out is None:
        raise UsageError(f"--format {format.value} says how to store data; add --out DIR.")
    per_batch = frames_per_batch or envs * max(1, _BATCH // envs)
    job = _Job(env, frames, envs, policy, seed, max_frames_per_traj, per_batch, out, format)
    with _one_line_warnings():
        return _collect(job)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test of half a minute.")] = False,
) -> int:
    """Measure swath against its peers; needs a source checkout."""
    near = (Path(__file__).parents[2], Path.cwd())
    roots = [p for p in near if (p / "bench/__main__.py").exists() and (p / "src/swath").is_dir()]
    if not roots:
        raise UsageError(
            "the benchmarks are not part of the installed package: run this in a source checkout "
            "of swath, where the folder bench/ is."
        )
    command = [sys.executable, "-m", "bench", *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=roots[0], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return app(given or ["--help"], prog_name="swath", standalone_mode=False) or 0
    except _BadUsage as error:
        return _fail(error.format_message())
    except (SwathError, OSError) as error:
        return _fail(_explained(error))
    except (KeyboardInterrupt, typer.Abort):
        _say_error("interrupted")
        return _INTERRUPTED


# -- collecting -------------------------------------------------------------------------------


def _collect(job: _Job) -> int:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # policies and 'module:Id-v0' envs live where the user is
    from swath.collectors import Collector
    from swath.envs import GymEnv, SerialEnv

    env = GymEnv(job.env) if job.envs == 1 else SerialEnv(job.envs, job.env)
    with contextlib.ExitStack() as stack:
        writer = _make_writer(job, env)
        if writer is not None:
            stack.callback(writer.discard)  # nothing, once it is closed
        collector = Collector(
            env,
            _make_policy(job, env),
            frames_per_batch=job.frames_per_batch,
            total_frames=job.frames,
            max_frames_per_traj=job.max_frames_per_traj,
            seed=job.seed,
        )
        with collector:
            run = _Run(collector, writer)
            run.go(job.frames)
        if run.stats["frames"] or run.failure is None:
            _report(job, run)
    if run.failure is not None:
        return _fail(_explained(run.failure))
    return _INTERRUPTED if run.interrupted else 0


def _make_writer(job: _Job, env: Env) -> DatasetWriter | MinariWriter | None:
    from swath.data import DatasetWriter, MinariWriter

    policy = job.policy or "random"
    if job.out is None:
        return None
    if job.format is Format.minari:
        return MinariWriter(job.out, env=env.group.envs[0], policy=policy)  # type: ignore[attr-defined]
    return DatasetWriter(
        job.out,
        env_id=job.env,
        seed=job.seed,
        policy=policy,
        observation_space=env.observation_space,
        action_space=env.action_space,
    )


class _Run:
    """One collection: what it gave and where its time went."""

    def __init__(self, collector: Collector, writer: DatasetWriter | MinariWriter | None) -> None:
        self._collector, self.writer = collector, writer
        self.failure: Exception | None = None
        self.interrupted = False
        self.collecting = self.writing = 0.0

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of the collector."""
        return self._collector.stats()

    def go(self, frames: int) -> None:
        """Collect and write until all is there, Ctrl-C or a failure; then finish the dataset."""
        from swath.observe.progress import Bar

        bar = Bar(frames) if _out.is_terminal else None
        with self._handling_interrupts():
            with contextlib.closing(bar) if bar is not None else contextlib.nullcontext():
                try:
                    self._loop(bar)
                except KeyboardInterrupt:
                    self.interrupted = True
                except (SwathError, OSError) as error:
                    self.failure = error
                self._write(self._collector.partial())  # whole steps of a broken rollout
            if self.writer is not None and self.writer.frames:
                with _err.status(f"storing {self.writer.frames:,} frames"):
                    self.writer.close()

    def _loop(self, bar: Bar | None) -> None:
        while not self.interrupted:
            if bar is not None:
                bar.update(self.stats)
            started = perf_counter()
            try:
                batch = self._collector.next()
            finally:
                self.collecting += perf_counter() - started
            if batch is None:
                return
            self._write(batch)

    def _write(self, batch: Any) -> None:
        if self.writer is not None and batch is not None:
            started = perf_counter()
            self.writer.write(batch)
            self.writing += perf_counter() - started

    @contextlib.contextmanager
    def _handling_interrupts(self) -> Iterator[None]:
        from swath.rollout import loop

        def handle(_: int, frame: FrameType | None) -> None:
            while frame is not None and frame.f_code is not loop.run.__code__:
                frame = frame.f_back
            if self.interrupted or frame is not None:
                raise KeyboardInterrupt
            self.interrupted = True

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


# -- the policy -------------------------------------------------------------------------------


def _make_policy(job: _Job, env: Env) -> Any:
    """Return the policy that `--policy` names; the rule is in its help."""
    if job.policy is None:
        return None
    import torch

    found = _imported(job.policy)
    if isinstance(found, torch.nn.Module):
        return found
    needed = _required_arguments(found)
    if needed == 1 and not isinstance(found, type):
        return found
    if needed not in (0, 2):
        what = "takes no arguments that can be seen" if needed is None else f"needs {needed}"
        raise UsageError(
            f"--policy {job.policy!r}: {type(found).__name__} {what}; expected a function of "
            "(observation_space, action_space) or of nothing that returns the policy, a function "
            "of the observation, or an nn.Module."
        )
    with torch.random.fork_rng(devices=[]):
        if job.seed is not None:
            torch.manual_seed(job.seed)
        try:
            made = found(env.observation_space, env.action_space) if needed else found()
        except Exception as error:
            raise UsageError(
                f"--policy {job.policy!r} raised {type(error).__name__}: {error}"
            ) from error
    if made is None:
        raise UsageError(f"--policy {job.policy!r} returned None; it must return the policy.")
    return made


def _imported(reference: str) -> Any:
    name, colon, path = reference.partition(":")
    if not (name and colon and path):
        raise UsageError(
            f"--policy {reference!r} is not of the form module:name, such as my_policies:make."
        )
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the module raises
        raise UsageError(
            f"--policy {reference!r}: importing {name!r} raised {type(error).__name__}: {error}"
        ) from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        hint = nearest(path, [n for n in vars(module) if not n.startswith("_")])
        raise UsageError(
            f"--policy {reference!r}: the module {name!r} has no {path!r}.{hint}"
        ) from error


def _required_arguments(function: Any) -> int | None:
    """Return how many arguments without default a callable has; None if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.default is p.empty and p.kind not in packed for p in parameters)


# -- what is shown ----------------------------------------------------------------------------


def _report(job: _Job, run: _Run) -> None:
    """Print the summary, and where the data is."""
    stats, seconds = run.stats, run.collecting + run.writing
    table = Table(title=f"{job.env}, {job.policy or 'random'} policy", show_header=False)
    table.add_row("frames", f"{stats['frames']:,} of {job.frames:,}, from {job.envs} envs")
    table.add_row("frames/s", f"{stats['frames'] / seconds if seconds else 0:,.0f}")
    table.add_row("episodes", f"{stats['episodes']:,}")
    for name in ("return", "length"):
        table.add_row(name, _spread(stats[name]))
    table.add_row("time", _shares(stats["time"], run))
    _out.print(table, highlight=False)
    if run.interrupted:
        _say(_out, "interrupted: this is what there was until then")
    if job.out is None:
        _say(_out, "data: not kept; --out DIR keeps it")
    elif run.writer is None or not run.writer.frames:
        _say(_out, "data: none, so nothing was stored")
    else:
        _say(_out, f"data: {run.writer.directory}")
        _say(_out, f"load: {run.writer.load_call}")


def _spread(values: dict[str, float] | None) -> str:
    if values is None:
        return "no episode has ended"
    return "  ".join(f"{name.replace('_', ' ')} {value:,.1f}" for name, value in values.items())


def _shares(time: dict[str, float], run: _Run) -> str:
    """Return where the time went, all of it: the collector knows only of its own."""
    seconds = run.collecting + run.writing
    if not any(time.values()):
        return f"{seconds:,.1f} s"  # broken off in the first rollout: no step was timed
    shares = {name: time[name] * run.collecting / seconds for name in ("env", "policy")}
    if run.writer is not None:
        shares["writing"] = run.writing / seconds
    shares["rest"] = 1.0 - sum(shares.values())
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"{seconds:,.1f} s: {parts}"


def _say(console: Console, text: str) -> None:
    """Print text as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _say_error(text: str) -> None:
    """Print one line on stderr."""
    _say(_err, " ".join(Text.from_ansi(f"swath: {text}").plain.split()))


def _fail(text: str) -> int:
    _say_error(f"error: {text}")
    return 2


def _explained(error: BaseException) -> str:
    """Return the message of an error, and the line of the user's code that it comes from."""
    text = str(error).replace("; see the cause above", "")
    if not isinstance(error, SwathError) or error.__cause__ is None:
        return text
    others = ("<", str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib")))
    own = [
        frame
        for frame in traceback.extract_tb(error.__cause__.__traceback__)
        if not frame.filename.startswith(others)
    ]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _say_error(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
