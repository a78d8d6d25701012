"""Private names of other packages: which version has lost one, and what happens then."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import tensordict.nn as tdnn
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

import swath
from swath.collectors import Collector
from swath.compat import gymnasium as of_gymnasium
from swath.compat import ray as of_ray
from swath.compat import tensordict as of_tensordict
from swath.compat import torch as of_torch
from swath.data import ReplayBuffer

SOURCE = Path(swath.__file__).parent
MODULE = tdnn.TensorDictModule(nn.Linear(2, 2), in_keys=["a"], out_keys=["b"])
SEQUENCE = tdnn.TensorDictSequential(MODULE)
CHOICE = tdnn.ProbabilisticTensorDictModule(
    in_keys=["loc", "scale"],
    out_keys=["action"],
    distribution_class=torch.distributions.Normal,
)
LIMITED = gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 7)
USED = [
    ("torch", nn.Linear(1, 1), "_forward_hooks _forward_pre_hooks _compiled_call_impl _modules"),
    ("torch", nn.Linear(1, 1), "_parameters"),
    ("torch", nn.modules.module, "_has_any_global_hook"),
    ("torch", torch.distributions.Distribution, "_validate_args"),
    ("torch", torch.cuda.jiterator, "_create_jit_fn"),
    ("torch", dist.ProcessGroupGloo, "_Options"),
    ("tensordict", TensorDict, "_new_unsafe"),
    ("tensordict", TensorDict({}, []), "_tensordict"),
    ("tensordict", SEQUENCE, "_select_before_return _module_iter _run_module"),
    ("tensordict", MODULE, "_kwargs _get_kwargs _call_module _write_to_tensordict"),
    ("tensordict", CHOICE, "_dist_sample"),
    ("gymnasium", LIMITED, "_max_episode_steps"),
    ("gymnasium", gym.spaces.Discrete(2), "_np_random"),
]


@pytest.mark.parametrize(
    ("package", "holder", "names"), USED, ids=[f"{one[0]}-{one[2].split()[0]}" for one in USED]
)
def test_the_private_names_that_are_used_are_there(package, holder, names):
    for name in names.split():
        assert hasattr(holder, name), (
            f"{package} {version(package)} has no {name!r} any more: the shortcut that needs it is "
            f"off or broken; see src/swath/compat/{package}.py"
        )


def test_ray_has_the_private_name_that_is_used():
    ray = pytest.importorskip("ray.actor")
    assert "_actor_id" in Path(ray.__file__).read_text(), (
        f"ray {version('ray')} has no '_actor_id' any more; see src/swath/compat/ray.py"
    )


def test_private_names_of_others_are_used_in_compat_only():
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    own |= {
        one.attr
        for one in nodes
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
    }
    allowed = {"_exit", "_args_from_interpreter_flags"}  # of Python itself
    for path, tree in trees.items():
        if path.parent.name != "compat":
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            others = {name for name in used if name.startswith("_") and not name.endswith("__")}
            assert others - own <= allowed, path


# -- what happens without them --------------------------------------------------------------------


class _Without:
    """Stands for an object of a version that lacks some names."""

    def __init__(self, inner, *names):
        self.__dict__.update(inner=inner, names=names)

    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("name", ["_select_before_return", "_module_iter"])
def test_a_sequence_that_cannot_be_taken_apart_is_called_as_a_whole(name):
    assert of_tensordict.plain_parts(SEQUENCE) == [MODULE]
    assert of_tensordict.plain_parts(_Without(SEQUENCE, name)) is None


@pytest.mark.parametrize("name", ["_kwargs", "_get_kwargs"])
def test_a_module_that_cannot_be_looked_into_is_called_as_a_whole(name):
    assert of_tensordict.is_plain_module(MODULE)
    assert not of_tensordict.is_plain_module(_Without(MODULE, name))


def test_a_module_whose_methods_were_renamed_is_called_as_a_whole(monkeypatch):
    assert of_tensordict.is_plain_choice(CHOICE)
    for name in ("TensorDictModule", "ProbabilisticTensorDictModule"):
        monkeypatch.setattr(of_tensordict, name, object)  # it has none of the methods
    assert not of_tensordict.is_plain_module(MODULE)
    assert not of_tensordict.is_plain_choice(CHOICE)
    policy = tdnn.TensorDictModule(
        lambda observation: observation[..., :1].gt(0).long()[..., 0], ["observation"], ["action"]
    )
    with Collector("CartPole-v1", policy, frames_per_batch=5) as collector:
        assert collector.next().numel() == 5


def test_batches_of_a_buffer_are_made_the_public_way_where_there_is_no_other(monkeypatch):
    monkeypatch.setattr(
        of_tensordict, "TensorDict", lambda *some, **more: TensorDict(*some, **more)
    )
    buffer = ReplayBuffer(8)
    buffer.extend(TensorDict({"a": torch.arange(4), "next": {"a": torch.arange(4) + 1}}, [4]))
    batch = buffer.sample(3)
    assert batch.batch_size == torch.Size([3])
    assert torch.equal(batch["next", "a"], batch["a"] + 1)


def test_modules_whose_hooks_cannot_be_seen_are_called_as_they_are():
    assert not of_torch.is_hooked(nn.Linear(1, 1))
    assert of_torch.is_hooked(_Without(nn.Linear(1, 1), "_forward_hooks"))
    assert list(of_torch.named_layers(_Without(nn.Sequential(nn.ReLU()), "_modules"))) == ["0"]


def test_other_shortcuts_have_a_public_way_too(monkeypatch):
    monkeypatch.delattr(torch.cuda.jiterator, "_create_jit_fn")
    assert of_torch.compiled_for_cuda("") is None
    monkeypatch.delattr(torch.distributions.Distribution, "_validate_args")
    assert of_torch.validates_distributions() is True
    assert of_torch.has_rpc_agent() is False
    monkeypatch.delattr(torch.distributed.rpc.api, "_is_current_rpc_agent_set")
    assert of_torch.has_rpc_agent() is False
    assert of_gymnasium.step_limit(LIMITED) == 7
    spec = SimpleNamespace(max_episode_steps=9)
    assert of_gymnasium.step_limit(SimpleNamespace(spec=spec)) == 9
    assert of_ray.actor_id(SimpleNamespace(_actor_id=b"\x01\x02")) == "0102"

    class Handle:
        def __repr__(self):
            return "Actor(Host, 3f2a9c0d11223344556677)"

    assert of_ray.actor_id(Handle()) == "3f2a9c0d11223344556677"
