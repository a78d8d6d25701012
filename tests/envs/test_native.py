"""Torch-native envs against Gymnasium's, and the promises that CUDA graphs and seeds rest on."""

import copy
import pickle
import re
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from swath.envs import native
from swath.envs.native import BatchedTorchEnv, TorchCartPole, TorchEnv, TorchPendulum
from swath.errors import EnvError, PolicyError, UsageError

ENVS = [TorchCartPole, TorchPendulum]
both_envs = pytest.mark.parametrize("make_env", ENVS)


class Still(BatchedTorchEnv):
    """An env whose dynamics return what they were given, the way to leak memory if there is one."""

    observation_space = gymnasium.spaces.Dict({"place": gymnasium.spaces.Box(0, 1, (1,))})
    action_space = gymnasium.spaces.Discrete(2)

    def _initial(self, uniform):
        return uniform

    def _dynamics(self, state, action):
        return state, action.double(), action > 1

    def _observe(self, state):
        return {"place": state}


def random_actions(env: TorchEnv, generator: torch.Generator) -> Tensor:
    """Actions over the whole space and, for a torque, beyond it."""
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        return torch.randint(2, (env.num_envs,), generator=generator)
    return 6 * torch.rand(env.num_envs, 1, generator=generator) - 3


def play(env: TorchEnv, num_steps: int, columns: slice = slice(None)) -> Tensor:
    """Run `num_steps` with resets; the actions of env i depend on i alone. Returns a record."""
    generator = torch.Generator().manual_seed(5)
    wide = type(env)(8)
    rows = [env.reset()]
    for _ in range(num_steps):
        action = random_actions(wide, generator)[columns]
        observation, reward, terminated, truncated = env.step(action)
        rows.append(torch.cat([observation, reward[:, None], terminated[:, None]], dim=-1))
        rows.append(env.reset(terminated | truncated))
    return torch.cat(rows, dim=-1)


def check_against_gymnasium(
    env: BatchedTorchEnv,
    name: str,
    num_steps: int,
    choose: Callable[[BatchedTorchEnv, torch.Generator], Tensor],
) -> list[int]:
    """Compare each step from equal states; count the ends: terminated, truncated, both at once."""
    twins = [
        gymnasium.make(name, max_episode_steps=env.max_episode_steps, disable_env_checker=True)
        for _ in range(env.num_envs)
    ]
    for twin in twins:
        twin.reset(seed=0)
    generator = torch.Generator().manual_seed(0)
    env.seed(torch.arange(env.num_envs))
    env.reset()
    ends = torch.zeros(3, dtype=torch.int64)
    for _ in range(num_steps):
        action = choose(env, generator)
        for row, twin in zip(env.state.numpy(), twins, strict=True):
            twin.unwrapped.state = row.copy()
        observation, reward, terminated, truncated = env.step(action)
        for i, twin in enumerate(twins):
            expected, its_reward, its_terminated, its_truncated, _ = twin.step(action[i].numpy())
            np.testing.assert_array_max_ulp(observation[i].numpy(), expected, maxulp=1)
            np.testing.assert_array_max_ulp(reward[i].numpy(), np.float32(its_reward), maxulp=1)
            assert bool(terminated[i]) == its_terminated
            assert bool(truncated[i]) == its_truncated
            if its_terminated or its_truncated:
                twin.reset()
        ends += torch.stack([terminated, truncated, terminated & truncated]).sum(1)
        env.reset(terminated | truncated)
    return ends.tolist()


def test_cartpole_steps_as_gymnasium_does() -> None:
    def some_at_the_edge(env: BatchedTorchEnv, generator: torch.Generator) -> Tensor:
        """Put two envs where the track ends, which random actions do not reach."""
        jitter = 0.1 * torch.rand(2, generator=generator) - 0.05
        env.state[:2, 0] = torch.tensor([2.4, -2.4]) + jitter
        return random_actions(env, generator)

    env = TorchCartPole(8, max_episode_steps=15, dtype=torch.float64)
    ends = check_against_gymnasium(env, "CartPole-v1", 500, some_at_the_edge)
    assert min(ends) > 5, f"the comparison missed a way to end: {ends}"


def test_pendulum_steps_as_gymnasium_does() -> None:
    fastest = torch.zeros(())

    def pump_half(env: BatchedTorchEnv, generator: torch.Generator) -> Tensor:
        """Push half of the envs along, so that they turn over and reach the speed limit."""
        speed = env.state[:, 1]
        fastest.copy_(torch.maximum(fastest, speed.abs().max()))
        action = random_actions(env, generator)
        action[::2, 0] = 3 * speed[::2].sign().float()
        return action

    env = TorchPendulum(8, dtype=torch.float64)
    ends = check_against_gymnasium(env, "Pendulum-v1", 500, pump_half)
    assert ends == [0, 2 * 8, 0]
    assert fastest == 8.0


@pytest.mark.parametrize(
    ("make_env", "name", "limit"),
    [(TorchCartPole, "CartPole-v1", 500), (TorchPendulum, "Pendulum-v1", 200)],
)
def test_spaces_and_time_limit_are_gymnasiums(
    make_env: type[BatchedTorchEnv], name: str, limit: int
) -> None:
    env, twin = make_env(2), gymnasium.make(name)
    assert env.observation_space == twin.observation_space
    assert env.action_space == twin.action_space
    assert env.max_episode_steps == twin.spec.max_episode_steps == limit
    assert isinstance(env, TorchEnv)
    assert not isinstance(twin, TorchEnv)


@both_envs
def test_float32_follows_float64(make_env: type[BatchedTorchEnv]) -> None:
    single, double = make_env(16), make_env(16, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for env in (single, double):
        env.seed(torch.arange(16))
    torch.testing.assert_close(single.reset(), double.reset(), rtol=0, atol=1e-6)
    for _ in range(10):
        action = random_actions(single, generator)
        result = single.step(action)
        torch.testing.assert_close(result, double.step(action), rtol=1e-4, atol=1e-4)
        assert [x.dtype for x in result] == [torch.float32] * 2 + [torch.bool] * 2


@both_envs
def test_initial_states_fill_their_range(make_env: type[BatchedTorchEnv]) -> None:
    env = make_env(20_000)
    env.seed(torch.arange(20_000))
    env.reset()
    high = torch.tensor([0.05] * 4 if make_env is TorchCartPole else [torch.pi, 1.0])
    scaled = env.state / high
    assert scaled.abs().max() <= 1
    assert scaled.abs().amax(0).min() > 0.999
    torch.testing.assert_close(scaled.mean(0), torch.zeros(len(high)), rtol=0, atol=0.02)
    torch.testing.assert_close(scaled.var(0), torch.full((len(high),), 1 / 3), rtol=0, atol=0.01)


def test_episodes_are_truncated_at_the_limit_and_only_there() -> None:
    env = TorchPendulum(3, max_episode_steps=5)
    env.reset()
    flags = []
    for step in range(7):
        truncated = env.step(torch.zeros(3, 1))[3]
        flags.append(truncated.tolist())
        mask = truncated.clone()
        mask[2] = step == 1
        env.reset(mask)
    assert flags == [[step == 4, step == 4, step == 6] for step in range(7)]
    endless = TorchPendulum(1, max_episode_steps=None)
    assert not any(endless.step(torch.zeros(1, 1))[3] for _ in range(20))


@both_envs
def test_masked_reset_leaves_the_other_envs_alone(make_env: type[BatchedTorchEnv]) -> None:
    env = make_env(4)
    env.seed(torch.arange(4))
    env.reset()
    action = random_actions(env, torch.Generator().manual_seed(0))
    observation = [env.step(action)[0] for _ in range(2)][-1]
    untouched = copy.deepcopy(env)
    mask = torch.tensor([False, True, False, True])
    again = env.reset(mask)
    for name in ("_state", "_counter", "_elapsed"):
        before, after = getattr(untouched, name), getattr(env, name)
        assert torch.equal(before[~mask], after[~mask])
        assert not (before[mask] == after[mask]).any()
    assert torch.equal(again[~mask], observation[~mask])
    assert not (again[mask] == observation[mask]).any()
    assert torch.equal(env._elapsed, torch.tensor([2, 0, 2, 0]))


@both_envs
def test_an_env_depends_on_its_key_and_not_on_its_batch(make_env: type[BatchedTorchEnv]) -> None:
    keys = torch.tensor([7, -1, 2**62, 0, 1, 2, 3, 4])
    whole = make_env(8, max_episode_steps=15)
    whole.seed(keys)
    together = play(whole, 60)
    for half in (slice(0, 4), slice(4, 8)):
        env = make_env(4, max_episode_steps=15)
        env.seed(keys[half])
        assert torch.equal(play(env, 60, half), together[half])
    assert len(together.unique(dim=0)) == 8


@both_envs
def test_seed_restarts_the_stream(make_env: type[BatchedTorchEnv]) -> None:
    env = make_env(3)
    env.seed(torch.arange(3))
    first, second = env.reset(), env.reset()
    assert not (first == second).any()
    env.seed(torch.arange(3))
    assert torch.equal(env.reset(), first)


@both_envs
def test_global_random_state_is_never_touched(make_env: type[BatchedTorchEnv]) -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)
    first, second = make_env(4), make_env(4)
    assert not (first.reset() == second.reset()).any(), "unseeded envs must differ"
    first.seed(torch.arange(4))
    play(first, 10, slice(0, 4))
    assert torch.equal(torch.get_rng_state(), torch_before)
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy_before)


@both_envs
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_continues_identically(
    make_env: type[BatchedTorchEnv], clone: Callable[[BatchedTorchEnv], BatchedTorchEnv]
) -> None:
    env = make_env(4, max_episode_steps=15)
    play(env, 20, slice(0, 4))
    action = random_actions(env, torch.Generator().manual_seed(0))
    twin = clone(env)
    for mine, its in zip(env.step(action), twin.step(action), strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(play(env, 40, slice(0, 4)), play(twin, 40, slice(0, 4)))


@both_envs
def test_state_stays_at_its_address(make_env: type[BatchedTorchEnv]) -> None:
    def addresses(env: BatchedTorchEnv) -> dict[str, int]:
        return {k: v.data_ptr() for k, v in vars(env).items() if isinstance(v, Tensor)}

    env = make_env(4, max_episode_steps=5)
    before = addresses(env)
    assert before.keys() >= {"_key", "_counter", "_elapsed", "_state"}
    env.seed(torch.arange(4))
    play(env, 10, slice(0, 4))
    env.state = torch.ones_like(env.state)
    assert addresses(env) == before
    assert (env.state == 1).all()


@both_envs
def test_no_method_reads_a_value_on_the_host(make_env: type[BatchedTorchEnv]) -> None:
    env = make_env(4, device="meta")  # tensors without values: reading one raises
    env.seed(torch.arange(4))
    env.reset()
    action = torch.zeros(4, *(env.action_space.shape or ()), dtype=torch.int64, device="meta")
    _, _, terminated, truncated = env.step(action)
    assert env.reset(terminated | truncated).device.type == "meta"


@pytest.mark.parametrize("make_env", [*ENVS, Still])
def test_what_was_returned_does_not_change_later(make_env: type[BatchedTorchEnv]) -> None:
    env = make_env(8)
    actions = [random_actions(env, torch.Generator().manual_seed(i)) for i in range(2)]
    returned = [env.reset(), env.step(actions[0]), env.reset(), env.step(actions[1])]
    snapshot = copy.deepcopy(returned)
    env.reset()
    env.state = torch.full_like(env.state, 0.5)
    torch.testing.assert_close(returned, snapshot, rtol=0, atol=0)


def test_gradients_of_an_action_do_not_enter_the_state() -> None:
    env = TorchPendulum(2)
    env.reset()
    observation, reward, *_ = env.step(torch.ones(2, 1, requires_grad=True))
    assert not any(x.requires_grad for x in (env.state, observation, reward))


def test_own_env_gets_dict_observations_and_float32_reward() -> None:
    env = Still(3)
    assert env.reset()["place"].shape == (3, 1)
    observation, reward, terminated, _ = env.step(torch.tensor([0, 1, 2]))
    assert torch.equal(observation["place"], env.state)
    assert reward.dtype == torch.float32
    assert terminated.tolist() == [False, False, True]
    assert env.action_space is not Still(3).action_space


def test_mistakes_are_named() -> None:
    class Wide(Still):
        def _dynamics(self, state, action):
            return state, action[:, None], action > 1

    class Few(Still):
        def _initial(self, uniform):
            return uniform[:1]

    env = TorchCartPole(3)
    left = torch.zeros(3, dtype=torch.int64)
    mistakes: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (UsageError, "num_envs must be at least 1, got 0", lambda: TorchCartPole(0)),
        (UsageError, "max_episode_steps must be at least 1", lambda: TorchCartPole(1, None, 0)),
        (UsageError, "floating point", lambda: TorchCartPole(1, dtype=torch.int64)),
        (UsageError, "keys must have shape [3], got [2]", lambda: env.seed(torch.arange(2))),
        (UsageError, "keys must be int64", lambda: env.seed(torch.zeros(3))),
        (UsageError, "mask must have shape [3], got [3, 1]", lambda: env.reset(left[:, None] > 0)),
        (UsageError, "state must have shape [3, 4]", lambda: setattr(env, "state", left)),
        (PolicyError, "action must have shape [3]", lambda: env.step(left[:, None])),
        (EnvError, "the reward from _dynamics must have shape [3]", lambda: Wide(3).step(left)),
        (EnvError, "from _initial, cut to [N], must have shape [3], got [1]", lambda: Few(3)),
    ]
    for error, message, make in mistakes:
        with pytest.raises(error, match=re.escape(message)):
            make()


def reference_uniform(key: int, counter: int, column: int) -> float:
    """The generator in Python's unbounded integers, where a right shift is unsigned."""
    size = 2**64
    place = counter * 0x9E3779B97F4A7C15 + (column + 1) * 0xD6E8FEB86659FD93
    bits = (key * 0xD1342543DE82EF95 % size) ^ (place % size)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % size
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % size
    return (bits >> 40) / 2**24


def test_counter_uniform_equals_its_definition() -> None:
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    counters = [0, 1, 2, 2**40, 2**63 - 1, 77]
    drawn = native.counter_uniform(torch.tensor(keys), torch.tensor(counters), 5)
    expected = [
        [reference_uniform(key, counter, j) for j in range(5)]
        for key, counter in zip(keys, counters, strict=True)
    ]
    assert drawn.dtype == torch.float32
    assert drawn.tolist() == expected


@pytest.mark.parametrize("stride", [1, 2**32, 0x9E3779B1], ids=["one", "high", "env_seed"])
def test_counter_uniform_looks_uniform_and_uncorrelated(stride: int) -> None:
    size = 256
    keys = (torch.arange(size) * stride).repeat_interleave(size)
    counters = torch.arange(size).repeat(size)
    drawn = native.counter_uniform(keys, counters, 4).double()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    cube = drawn.view(size, size, 4)  # [key, counter, column]
    deviation = (cube - 0.5) * 12**0.5  # mean 0, variance 1
    tolerance = 5 / cube.numel() ** 0.5  # five standard errors
    assert deviation.mean().abs() < tolerance
    assert (deviation.square().mean() - 1).abs() < tolerance
    for axis, lag in [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]:
        near = deviation.narrow(axis, 0, cube.shape[axis] - lag)
        far = deviation.narrow(axis, lag, cube.shape[axis] - lag)
        assert (near * far).mean().abs() < 5 / near.numel() ** 0.5, f"axis {axis}, lag {lag}"
    counts = torch.histc(drawn.flatten(), bins=64, min=0, max=1)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert 20 < chi_square < 130  # 63 degrees of freedom: mean 63, standard deviation 11
    # Each stream on its own, too: no key and no counter with a tilted row.
    assert deviation.mean(dim=(1, 2)).abs().max() < 5 / (4 * size) ** 0.5
    assert deviation.mean(dim=(0, 2)).abs().max() < 5 / (4 * size) ** 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both_envs
def test_a_captured_rollout_equals_the_eager_one(make_env: type[BatchedTorchEnv]) -> None:
    keys = torch.arange(64, device="cuda")
    eager = make_env(64, "cuda", max_episode_steps=7)
    eager.seed(keys)
    eager.reset()
    captured = copy.deepcopy(eager)
    action = random_actions(eager, torch.Generator().manual_seed(0)).cuda()

    def rollout(env: BatchedTorchEnv) -> list[Tensor]:
        rows: list[Tensor] = []
        for _ in range(5):
            result = env.step(action)
            rows += [*result, env.reset(result[2] | result[3])]
        return rows

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rollout(captured)
    for _ in range(4):
        graph.replay()
        for mine, its in zip(rollout(eager), out, strict=True):
            assert torch.equal(mine, its)
    uniform = native.counter_uniform(keys, keys + 3, 6)
    assert torch.equal(uniform.cpu(), native.counter_uniform(keys.cpu(), keys.cpu() + 3, 6))
