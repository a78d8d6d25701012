"""The command line: what it collects, what it says, and how it fails."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import pytest
import torch
from wait_kit import comes_true

import swath
from swath import cli
from swath.cli import main
from swath.data import DatasetWriter, load_dataset
from swath.envs import GymEnv
from swath.testing import check_transitions

MODULE = '''
import signal, warnings
import gymnasium as gym, torch
from gymnasium import spaces
from swath.testing import CountingEnv, CrashingEnv, SlowEnv

action = spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "grip": spaces.Discrete(3)})
observation = spaces.Dict({"where": spaces.Box(-1, 1, (3,)), "n": spaces.Discrete(4)})

class Slow(SlowEnv):
    steps = 0
    def step(self, action):
        Slow.steps += 1
        if Slow.steps == 30:
            open("stepping", "w").close()
        return super().step(action)

class Interrupting(CountingEnv):
    """Ctrl-C, pressed in the middle of step 50 of all."""
    steps = 0
    def step(self, action):
        Interrupting.steps += 1
        if Interrupting.steps == 50:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)

def warning():
    warnings.warn("two\\nlines")
    return CountingEnv()

gym.register("Counting-v0", CountingEnv)
gym.register("Warning-v0", warning)
gym.register("Nested-v0", lambda: CountingEnv(action, observation))
gym.register("Crashing-v0", lambda: CrashingEnv(at_step=20, exception=KeyError("mass")))
gym.register("Broken-v0", lambda: 1 / 0)
gym.register("Slow-v0", lambda: Slow(0.02))
gym.register("Interrupting-v0", Interrupting)

class Terminated(CountingEnv):
    steps = 0
    def step(self, action):
        Terminated.steps += 1
        if Terminated.steps == 50:
            signal.raise_signal(signal.SIGTERM)
        return super().step(action)

def stopped():
    raise KeyboardInterrupt

gym.register("Terminated-v0", Terminated)
gym.register("Stopped-v0", stopped)

class Net(torch.nn.Module):
    def __init__(self, n=2):
        super().__init__()
        self.layer = torch.nn.Linear(4, n)
    def forward(self, obs):
        return self.layer(obs).argmax(-1)

def of_spaces(observation_space, action_space, extra=None):
    return Net(int(action_space.n))
def of_nothing(n=2):
    return Net(n)
def always_right(obs):
    return torch.ones(obs.shape[:-1], dtype=torch.int64)
module = Net()

def three(a, b, c): ...
def none(): ...
def raising(): raise ValueError("two\\nlines")
def failing(obs): raise ValueError("no idea")
class OneArgument:
    def __init__(self, obs): ...
number = 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a module of envs and policies in it."""
    (tmp_path / "things.py").write_text(MODULE)
    (tmp_path / "wrong.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("things", "wrong"):
        sys.modules.pop(name, None)
    registered = set(gym.registry)
    yield tmp_path
    for env_id in set(gym.registry) - registered:
        del gym.registry[env_id]


def rows(text: str) -> dict[str, str]:
    """Return the rows of the summary, and the lines below it."""
    lines = [line.strip("│ ").replace("│", ":", 1) for line in text.splitlines()]
    pairs = [line.partition(":") for line in lines if ":" in line]
    return {name.strip(): value.strip() for name, _, value in pairs}


def assert_one_line(text: str, *parts: str) -> None:
    assert text.count("\n") == 1, text
    assert text.startswith("swath: ")
    for part in parts:
        assert part in text


# -- collecting -----------------------------------------------------------------------------------


def test_a_collection_is_summed_up(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", "CartPole-v1", "--frames", "3000", "--seed", "0"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    summary = rows(out)
    assert summary["frames"] == "3,000 of 3,000, from 8 envs"
    assert int(summary["frames/s"].replace(",", "")) > 100
    assert int(summary["episodes"]) > 50
    for name in ("return", "length"):
        assert summary[name].split()[:-1:2] == ["mean", "min", "max", "last"]
    assert all(part in summary["time"] for part in (" s: env ", "policy ", "rest "))
    assert summary["data"] == "not stored; --out DIR stores it"
    assert sorted(path.name for path in here.glob("[!_]*")) == ["things.py", "wrong.py"]


@pytest.mark.parametrize("envs", [1, 3])
def test_the_data_is_kept_frame_by_frame(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, envs: int
) -> None:
    monkeypatch.setattr(cli, "_BATCH", 300)
    arguments = ["collect", "things:Counting-v0", "--frames", "1001", "--envs", str(envs)]
    options = ["--max-frames-per-traj", "5", "--out", "a/data"]
    assert main([*arguments, *options, "--seed", "3"]) == 0
    summary = rows(capsys.readouterr().out)
    assert summary["data"] == str(here / "a/data")
    data = eval(summary["load"], {"swath": swath})
    assert check_transitions(data, max_frames_per_traj=5) == {1: 1001, 3: 1002}[envs]
    assert summary["frames"] == f"{len(data):,} of 1,001, from {envs} envs"
    assert "writing" in summary["time"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_collect_the_same_frames(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(cli, "_BATCH", 300)
    arguments = ["collect", "things:Counting-v0", "--frames", "1000", "--envs", "5", "--seed", "3"]
    assert main([*arguments, "--out", "alone"]) == 0
    assert main([*arguments, "--out", "apart", "--workers", "2", "--mode", mode]) == 0
    assert "from 5 envs in 2 workers" in rows(capsys.readouterr().out)["frames"]
    alone, apart = load_dataset("alone"), load_dataset("apart")
    assert check_transitions(apart) == len(apart)
    assert 0 <= len(apart) - 1000 < 3  # less than one step of a worker's envs
    if mode == "sync":  # otherwise how many frames each worker makes depends on their speed
        seen, expected = ({tuple(o.tolist()) for o in d["observation"]} for d in (apart, alone))
        assert seen == expected


def test_the_same_seed_gives_the_same_data(here: Path) -> None:
    fixed = ["collect", "CartPole-v1", "--frames", "500", "--policy", "things:of_nothing"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        torch.rand(3)
        assert main([*fixed, "--seed", seed, "--out", name]) == 0
    a, b, c = (load_dataset(name) for name in "abc")
    assert (a == b).all()
    assert not torch.equal(a["observation"], c["observation"])


def test_minari_gets_its_episodes(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import minari

    arguments = ["collect", "things:Nested-v0", "--frames", "200", "--seed", "0"]
    assert main([*arguments, "--out", "data", "--format", "minari"]) == 0
    load = rows(capsys.readouterr().out)["load"]
    assert load.endswith(f"  # with MINARI_DATASETS_PATH={here / 'data'}")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(here / "data"))
    exported = eval(load, {"minari": minari})
    assert exported.spec.dataset_id == "nested/swath-v0"
    assert main([*arguments, "--out", "frames"]) == 0
    frames = load_dataset("frames")
    assert exported.total_steps == 200
    assert exported.total_episodes == len(frames["collector", "traj_ids"].unique())
    first = frames[frames["collector", "traj_ids"] == 0]
    assert (exported[0].observations["where"][1:] == first["next", "where"].numpy()).all()
    assert (exported[0].actions["grip"] == first["action", "grip"].numpy()).all()


@pytest.mark.parametrize("name", ["of_spaces", "of_nothing", "Net", "module", "always_right"])
@pytest.mark.parametrize("envs", ["1", "2"])
def test_a_policy_is_a_function_or_what_a_function_returns(
    here: Path, name: str, envs: str
) -> None:
    arguments = ["--policy", f"things:{name}", "--frames", "60", "--envs", envs, "--out", "data"]
    assert main(["collect", "CartPole-v1", *arguments]) == 0
    actions = load_dataset("data")["action"]
    assert name != "always_right" or actions.all()


# -- failing --------------------------------------------------------------------------------------


BAD = [
    ("", "Missing argument 'ENV'"),
    ("Carpole-v1", "cannot make the env 'Carpole-v1': Environment `Carpole` doesn't exist"),
    ("nowhere:X-v0", "No module named 'nowhere'"),
    ("things:Broken-v0", "division by zero (things.py, line "),
    ("things:Crashing-v0", "the env raised KeyError: 'mass' in step() [env 0, step 20]"),
    ("CartPole-v1 --frames 0", "'--frames'"),
    ("CartPole-v1 --envs two", "'--envs'"),
    ("CartPole-v1 --seed -1", "'--seed'"),
    ("CartPole-v1 --frame 9", "No such option: --frame"),
    ("CartPole-v1 --mode async", "--mode async needs worker processes; add --workers N"),
    ("CartPole-v1 --workers 9", "--workers 9 is more than the 8 envs"),
    ("CartPole-v1 --workers 2 --policy things:failing", "ValueError: no idea"),
    ("CartPole-v1 --format csv", "'csv' is not one of 'tensordict', 'minari'"),
    ("CartPole-v1 --format minari", "add --out DIR"),
    ("CartPole-v1 --out .", "exists and is not empty; name another directory or delete it"),
    ("CartPole-v1 --out things.py", "things.py is a file"),
    ("CartPole-v1 --out things.py/x", "Not a directory"),
    ("CartPole-v1 --policy things", "'things': expected the form module:name"),
    ("CartPole-v1 --policy nowhere:f", "No module named 'nowhere'"),
    ("CartPole-v1 --policy wrong:f", "No module named 'no_such_module' (wrong.py, line 1)"),
    ("CartPole-v1 --policy things:of_space", "Did you mean 'of_spaces'?"),
    ("CartPole-v1 --policy things:three", "function needs 3 arguments; expected a function of"),
    ("CartPole-v1 --policy things:OneArgument", "type needs 1 arguments; expected a function of"),
    ("CartPole-v1 --policy things:number", "int cannot be called; expected"),
    ("CartPole-v1 --policy things:none", "returned None; it must return the policy"),
    ("CartPole-v1 --policy things:raising", "ValueError: two lines (things.py, line "),
    ("CartPole-v1 --policy things:failing", "ValueError: no idea"),
]


@pytest.mark.parametrize(("arguments", "part"), BAD)
def test_an_error_is_one_line_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: str, part: str
) -> None:
    assert main(["collect", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert_one_line(err, "swath: error: ", part)
    assert "cause above" not in err
    # Frames that were collected before are still reported.
    assert ("160 of" in rows(out)["frames"]) if "Crashing" in arguments else (out == "")
    assert sorted(path.name for path in here.glob("[!_]*")) == ["things.py", "wrong.py"]


def test_a_missing_minari_is_an_error_before_anything_is_collected(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    assert main(["collect", "CartPole-v1", "--out", "data", "--format", "minari"]) == 2
    assert_one_line(capsys.readouterr().err, 'pip install "swath[minari]"')
    assert not list(here.glob("data*"))


@pytest.mark.parametrize("form", ["tensordict", "minari"])
def test_frames_from_before_a_failure_are_kept(
    here: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    arguments = ["collect", "things:Crashing-v0", "--envs", "2", "--seed", "0", "--out", "data"]
    assert main([*arguments, "--format", form]) == 2
    out, err = capsys.readouterr()
    assert_one_line(err, "swath: error: the env raised KeyError: 'mass' in step() ", "step 20, s")
    assert rows(out)["frames"] == "40 of 200,000, from 2 envs"
    if form == "tensordict":
        assert check_transitions(load_dataset("data")) == 40
    else:
        assert (here / "data/crashing/swath-v0/data/main_data.hdf5").exists()


@pytest.mark.filterwarnings("default:two")
def test_a_warning_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", "things:Warning-v0", "--frames", "10", "--envs", "1"]) == 0
    assert_one_line(capsys.readouterr().err, "swath: warning: two lines")


# -- Ctrl-C ---------------------------------------------------------------------------------------


def test_interrupted_while_stepping_it_keeps_the_whole_steps(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    arguments = ["collect", "things:Interrupting-v0", "--envs", "2", "--seed", "0", "--out", "data"]
    assert main(arguments) == 130
    out, err = capsys.readouterr()
    assert err == ""
    assert rows(out)["frames"] == "48 of 200,000, from 2 envs"
    assert "interrupted: this is the summary of the frames collected so far" in out
    assert check_transitions(load_dataset("data")) == 48
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_ends_it_as_ctrl_c_does(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["collect", "things:Terminated-v0", "--envs", "2", "--out", "data"]
    assert main(arguments) == 143
    out = capsys.readouterr().out
    assert rows(out)["frames"] == "48 of 200,000, from 2 envs"
    assert check_transitions(load_dataset("data")) == 48
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ctrl_c_before_the_first_frame_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    arguments = ["collect", "things:Stopped-v0", "--envs", "2", "--workers", workers]
    assert main([*arguments, "--out", "data"]) == 130
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "swath: interrupted\n")
    assert not list(here.glob("data*"))


@pytest.mark.parametrize("frames", ["100", "1e2", "1_00", "100.0"])
def test_counts_are_taken_as_people_write_them(here: Path, frames: str) -> None:
    arguments = ["collect", "things:Counting-v0", "--envs", "2e0", "--frames", frames]
    assert main([*arguments, "--out", "data"]) == 0
    assert check_transitions(load_dataset("data")) == 100


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("--frames", "many", 1), ("--frames", "0", 1), ("--envs", "2.5", 1), ("--seed", "-1", 0)],
)
def test_a_count_that_is_none_is_told_with_its_value(
    capsys: pytest.CaptureFixture[str], option: str, value: str, least: int
) -> None:
    assert main(["collect", "CartPole-v1", option, value]) == 2
    said = f"'{value}' is not a whole number of at least {least}, such as 1000 or 1e3."
    assert capsys.readouterr().err == f"swath: error: Invalid value for '{option}': {said}\n"


@pytest.mark.parametrize(("presses", "frames"), [(1, 200), (2, 100)])
def test_interrupted_while_writing_it_finishes_the_batch_unless_pressed_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, presses: int, frames: int
) -> None:
    write = DatasetWriter.write

    def interrupted(self: DatasetWriter, batch: Any) -> None:
        for _ in range(presses if self.frames else 0):
            signal.raise_signal(signal.SIGINT)
        write(self, batch)

    monkeypatch.setattr(DatasetWriter, "write", interrupted)
    monkeypatch.setattr(cli, "_BATCH", 100)
    assert main(["collect", "things:Counting-v0", "--envs", "2", "--out", "data"]) == 130
    assert check_transitions(load_dataset("data")) == frames


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupted_while_storing_it_finishes_unless_pressed_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    close = DatasetWriter.close

    def interrupted(self: DatasetWriter) -> None:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        close(self)

    monkeypatch.setattr(DatasetWriter, "close", interrupted)
    arguments = ["collect", "things:Counting-v0", "--envs", "2", "--frames", "100"]
    assert main([*arguments, "--out", "data"]) == 130
    if presses == 1:
        assert check_transitions(load_dataset("data")) == 100
    else:
        assert not list(here.glob("data*"))


def test_the_installed_script_shows_a_bar_and_ends_cleanly_on_sigint(here: Path) -> None:
    script = Path(sys.executable).with_name("swath")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [script, "collect", "things:Slow-v0", "--envs", "2", "--out", "data"],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(follower)
    with process, open(leader, "rb", buffering=0) as terminal:
        try:
            _wait_for(here / "stepping")
            process.send_signal(signal.SIGINT)
            shown = _read_all(terminal)
            process.wait(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "swath: " not in shown  # no error
    frames = check_transitions(load_dataset(here / "data"))
    assert 0 < frames < 2048  # the first batch was far from full
    assert rows(shown)["frames"] == f"{frames:,} of 200,000, from 2 envs"
    assert "/200,000 frames" in shown
    assert "0% [...." in shown
    assert not (here / "data.partial").exists()


def _read_all(terminal: IO[bytes]) -> str:
    parts = []
    with contextlib.suppress(OSError):  # what a terminal says when nobody is left to write to it
        while part := terminal.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def _wait_for(path: Path, seconds: float = 40) -> None:
    assert comes_true(path.exists, seconds), f"{path} has not come"


# -- the rest -------------------------------------------------------------------------------------


def test_help_and_version_answer_without_torch() -> None:
    script = (
        "import sys; from swath.cli import main; "
        "codes = [main(a) for a in (['--version'], ['--help'], ['collect', '--help'], [])]; "
        "sys.exit(any(codes) or any(m in sys.modules for m in ('torch', 'gymnasium')))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith(f"swath {swath.__version__}\n")
    for part in ("collect ", "bench ", "--policy", "(observation_space, action_space)"):
        assert part in process.stdout


def test_bench_runs_the_benchmarks_of_a_checkout(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "__file__", str(here / "site-packages/swath/cli.py"))
    assert main(["bench", "--quick"]) == 2
    assert_one_line(capfd.readouterr().err, "swath: error: ", "source checkout")
    (here / "src/swath").mkdir(parents=True)
    (here / "bench").mkdir()
    (here / "bench/__main__.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    assert main(["bench", "--quick"]) == 3
    assert main(["bench"]) == 3
    assert capfd.readouterr().out == "['--quick']\n[]\n"


def test_info_says_what_is_in_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "data")
    assert main(["collect", "CartPole-v1", "--frames", "400", "--seed", "3", "--out", path]) == 0
    collected = capsys.readouterr().out
    assert main(["info", path]) == 0
    told = capsys.readouterr().out
    for words in ("400, 0.0 MB", "CartPole-v1", "float32 (4,)", "('next', 'reward')"):
        assert words in told
    for row in ("episodes", "return"):  # the same as the summary of the collection
        (line,) = [line for line in collected.splitlines() if f" {row} " in line]
        assert line.split("\u2502")[2].split()[-1 if row == "episodes" else 1] in told
    assert main(["info", str(tmp_path / "none")]) == 2
    assert "not a swath dataset" in capsys.readouterr().err


def test_info_verifies_checksums_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, column = str(tmp_path / "data"), tmp_path / "data/next/reward.memmap"
    with DatasetWriter(path, checksum=True) as writer:
        writer.write(GymEnv("CartPole-v1").rollout(5))
    assert main(["info", "--verify", path]) == 0
    assert "checksums: all files are unchanged" in capsys.readouterr().out
    column.write_bytes(bytes(20))
    assert main(["info", path]) == 0
    capsys.readouterr()
    assert main(["info", "--verify", path]) == 1
    assert_one_line(capsys.readouterr().err, "swath: error: ", "next/reward.memmap has crc32")
    os.truncate(column, 7)
    assert main(["info", path]) == 2
    assert_one_line(capsys.readouterr().err, "swath: error: ", "has 7 bytes; 20 bytes were")
    assert main(["info", "--verify", path]) == 1


def test_info_says_if_there_are_no_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "data")
    with DatasetWriter(path) as writer:
        writer.write(GymEnv("CartPole-v1").rollout(5))
    assert main(["info", "--verify", path]) == 0
    assert "checksums: none stored; all files have the right size" in capsys.readouterr().out
