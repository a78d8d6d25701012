"""Random actions: one stream per env, over every kind of action space."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_kit import assert_equal, collect, make_envs

from swath.policies import ActionSampler, RandomPolicy
from swath.policies.random import log_density
from swath.tree import action_leaves

INF = np.inf


class Odd(spaces.Discrete):
    """A space with a mind of its own."""

    def sample(self, *args: Any, **kwargs: Any) -> np.int64:
        return np.int64(2 * self.np_random.integers(5) + 1)


SPACES: dict[str, gym.Space[Any]] = {
    "discrete": spaces.Discrete(5),
    "discrete from": spaces.Discrete(4, start=-2),
    "one action": spaces.Discrete(1),
    "multi-discrete": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multi-discrete from": spaces.MultiDiscrete([3, 2], start=[5, -1]),
    "binary": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-2, 3, (2,)),
    "box of doubles": spaces.Box(-2, 3, (2, 2), np.float64),
    "uneven box": spaces.Box(np.array([-1.0, 5.0]), np.array([0.0, 50.0]), dtype=np.float64),
    "whole box": spaces.Box(-3, 4, (2,), np.int64),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "half-bounded": spaces.Box(np.array([1.0, -INF]), np.array([INF, -1.0]), dtype=np.float64),
    "unbounded": spaces.Box(-INF, INF, (3,)),
    "mixed box": spaces.Box(
        np.array([0, -INF, -INF, 2], np.float32), np.array([1, INF, 0, INF], np.float32)
    ),
    "enormous box": spaces.Box(-1.7e308, 1.7e308, (2,), np.float64),
    "empty box": spaces.Box(0, 1, (0,)),
    "dict": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-INF, INF, (2,))}),
    "tuple": spaces.Tuple([spaces.MultiBinary(3), spaces.Dict({"x": spaces.Discrete(9, start=1)})]),
    "own": Odd(10),
}
each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def draw(space: gym.Space[Any], pieces: list[int], indices: Any = (0, 1, 2)) -> list[np.ndarray]:
    """Actions drawn in pieces, `[sum(pieces), N, *shape]` for each leaf."""
    sampler = ActionSampler(action_leaves(space), indices)
    sampler.seed(3)
    drawn = [sampler.draw(steps) for steps in pieces]
    return [np.concatenate(columns) for columns in zip(*drawn, strict=True)]


@each_space
def test_pieces_of_any_size_make_the_same_stream(space):
    whole = draw(space, [12])
    for pieces in ([1] * 12, [5, 7], [11, 1]):
        for one, other in zip(draw(space, pieces), whole, strict=True):
            np.testing.assert_array_equal(one, other)


@each_space
def test_the_stream_of_an_env_depends_on_its_own_index_alone(space):
    for one, other in zip(draw(space, [6], [4, 2]), draw(space, [6], range(5)), strict=True):
        np.testing.assert_array_equal(one, other[:, [4, 2]])


@each_space
@pytest.mark.parametrize("num_envs", [1, 3])
def test_batches_of_any_size_get_the_same_actions(space, num_envs):
    runs = []
    for frames, batches in [(2, 6), (3, 4), (12, 1)]:
        options = {"frames_per_batch": frames * num_envs, "batches": batches}
        runs.append(collect(None, make_envs(num_envs, space), **options))
    assert_equal(runs[0], runs[1])
    assert_equal(runs[0], runs[2])


@each_space
def test_every_action_is_in_the_space_with_its_shape_and_dtype(space):
    for leaf, drawn in zip(action_leaves(space), draw(space, [200]), strict=True):
        assert drawn.shape == (200, 3, *leaf.shape)
        assert drawn.dtype == leaf.dtype
        assert all(leaf.space.contains(one) for one in drawn.reshape(600, *leaf.shape))


@pytest.mark.parametrize(
    ("space", "low", "high"),
    [
        (spaces.Discrete(4, start=-2), -2, 1),
        (spaces.MultiDiscrete([6], start=[2]), 2, 7),
        (spaces.MultiBinary(1), 0, 1),
        (spaces.Box(-3, 4, (1,), np.int16), -3, 4),
    ],
)
def test_whole_numbers_are_equally_likely(space, low, high):
    drawn = draw(space, [6000])[0].ravel()
    counts = np.bincount(drawn.astype(int) - low, minlength=high - low + 1)
    assert len(counts) == high - low + 1
    expected = len(drawn) / len(counts)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_real_numbers_are_uniform_exponential_or_normal():
    drawn = draw(SPACES["mixed box"], [20000])[0].reshape(-1, 4).astype(np.float64)
    uniform, normal, below, above = drawn.T
    np.testing.assert_allclose(np.histogram(uniform, 10, (0, 1))[0] / len(drawn), 0.1, atol=0.01)
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert abs((np.abs(normal) < 1).mean() - 0.6827) < 0.01
    for tail in (-below, above - 2):
        assert tail.min() >= 0
        assert abs(tail.mean() - 1) < 0.03
        assert abs((tail > 1).mean() - np.exp(-1)) < 0.01
    assert np.abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.02


def test_envs_and_parts_of_an_action_are_independent():
    space = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Box(0, 1, (2,))})
    columns = np.concatenate([part.reshape(4000, -1) for part in draw(space, [4000])], 1)
    assert columns.shape[1] == 12
    assert np.abs(np.corrcoef(columns.T) - np.eye(12)).max() < 0.06


def test_enormous_boxes_are_covered_on_both_sides():
    drawn = draw(SPACES["enormous box"], [100])[0]
    assert np.isfinite(drawn).all()
    assert drawn.min() < -1e308
    assert drawn.max() > 1e308


@each_space
def test_log_densities_are_those_of_the_draws(space):
    for leaf, drawn in zip(action_leaves(space), draw(space, [4000]), strict=True):
        density = log_density(leaf, drawn)
        assert density.shape == drawn.shape
        if isinstance(leaf.space, Odd):
            assert np.isnan(density).all()
            continue
        assert np.isfinite(density).all()
        if not isinstance(leaf.space, spaces.Box) or leaf.space.dtype.kind != "f":
            for place in np.ndindex(leaf.shape):
                at = drawn[(..., *place)].ravel()
                chances = np.exp(density[(..., *place)].ravel())
                np.testing.assert_allclose(chances, 1 / len(np.unique(at)), rtol=1e-6)


def test_densities_of_real_numbers_integrate_to_one():
    leaf = action_leaves(SPACES["mixed box"])[0]
    grid = np.linspace(-20, 20, 400_001)
    density = np.exp(log_density(leaf, np.stack([grid] * 4, -1).astype(np.float32)))
    inside = np.stack([(0 <= grid) & (grid <= 1), grid < 99, grid <= 0, grid >= 2], -1)
    np.testing.assert_allclose((density * inside).sum(0) * (grid[1] - grid[0]), 1, atol=1e-3)


def test_a_single_point_is_certain():
    leaf = action_leaves(spaces.Box(1, 1, (2,)))[0]
    np.testing.assert_array_equal(log_density(leaf, np.ones((3, 2))), 0)


def test_nothing_and_a_random_policy_are_the_same():
    assert_equal(collect(None, make_envs(2)), collect(RandomPolicy(), make_envs(2)))


def test_seeds_make_different_streams():
    one = collect(None, make_envs(3, spaces.Discrete(99)), seed=0)["action"]
    other = collect(None, make_envs(3, spaces.Discrete(99)), seed=1)["action"]
    assert (one == other).float().mean() < 0.2
    assert (one[0] == one[1]).float().mean() < 0.5


def test_without_a_seed_runs_differ():
    one, other = (collect(None, make_envs(3, spaces.Discrete(99)), seed=None) for _ in range(2))
    assert not torch.equal(one["action"], other["action"])


def test_the_users_space_is_not_reseeded():
    space = Odd(10)
    space.seed(5)
    expected = [int(space.sample()) for _ in range(9)]
    space.seed(5)
    sampler = ActionSampler(action_leaves(space), [0])
    sampler.draw(4)
    assert [int(space.sample()) for _ in range(9)] == expected


def test_a_sampler_continues_from_its_state():
    leaves = action_leaves(SPACES["dict"])
    sampler = ActionSampler(leaves, range(3))
    sampler.draw(5)
    state = sampler.state_dict()
    expected = sampler.draw(4)
    other = ActionSampler(leaves, range(3))
    other.load_state_dict(state)
    for one, two in zip(other.draw(4), expected, strict=True):
        np.testing.assert_array_equal(one, two)
