"""TorchRL envs of any form: all is as TorchRL's own collector gives it."""

from __future__ import annotations

import pytest
import torch

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.utils import restore_next
from swath.envs import ParallelEnv

pytest.importorskip("torchrl.envs")
kit = pytest.importorskip("kits.torchrl_kit")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
FLAGS = {key for flag in kit.FLAGS for key in (flag, ("next", flag))}
FORMS = {
    "ends as a whole": {"parts": False},
    "ends as a whole and in parts": {},
    "ends in parts": {"at_root": False},
}


def theirs(env, policy, **options):
    from torchrl.collectors import Collector as TheirCollector

    collector = TheirCollector(env, policy, total_frames=-1, **options)
    batches = [collector.next() for _ in range(3)]
    collector.shutdown()
    return batches


def compare(ours, others, form):
    """Check that all of theirs is in ours, and the same."""
    assert ours.batch_size == others.batch_size
    beside = FLAGS if form == "ends in parts" else set()
    if form == "ends as a whole and in parts":
        # Theirs begins a new id whenever a part ends, though the env goes on; ours when it ends.
        beside = {("collector", "traj_ids")}
        others = others.exclude(*beside)
    for key in others.keys(True, True):
        assert ours[key].shape == others[key].shape, key
        assert ours[key].dtype == others[key].dtype, key
        assert torch.equal(ours[key], others[key]), key
    for key in others.keys(True):
        if key not in others.keys(True, True):
            assert ours.get(key).batch_size == others.get(key).batch_size, key
    more = set(ours.keys(True, True)) - set(others.keys(True, True))
    assert more == {("collector", "policy_version"), *beside}


@pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_several_rewards_actions_and_ends_are_as_torchrl_gives_them(form, batch_size):
    def make():
        return kit.Teams(batch_size, **FORMS[form])

    frames = 14 * max(1, torch.Size(batch_size).numel())
    expected = theirs(make(), kit.teams_policy(), frames_per_batch=frames)
    with Collector(make(), kit.teams_policy(), frames_per_batch=frames) as collector:
        got = [collector.next() for _ in range(3)]
    for ours, others in zip(got, expected, strict=True):
        compare(ours, others, form)
    assert len(torch.cat([batch["collector", "traj_ids"].flatten() for batch in got]).unique()) > 5


@pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)], ids=str)
def test_what_a_transform_writes_below_next_alone_is_in_the_batch(batch_size):
    from torchrl.envs import TransformedEnv
    from torchrl.envs.transforms import NextObservationDelta

    def make():
        return TransformedEnv(kit.Teams(batch_size), NextObservationDelta())

    frames = 14 * max(1, torch.Size(batch_size).numel())
    options = {"frames_per_batch": frames}
    expected = theirs(make(), kit.teams_policy(), **options)
    with Collector(make(), kit.teams_policy(), total_frames=-1, **options) as collector:
        batches = [collector.next() for _ in expected]
        assert collector.stats()["episodes"] > 0
    for ours, others in zip(batches, expected, strict=True):
        assert ("next", "delta") in others.keys(True)
        changes = others["next", "delta"]
        for key in changes.keys(True, True):
            assert ours["next", "delta"][key].dtype == torch.float16
            assert torch.equal(ours["next", "delta"][key], changes[key]), key
        for key in changes.keys(True):
            if key not in changes.keys(True, True):
                assert ours["next", "delta"][key].batch_size == changes[key].batch_size


DELIVERED = {
    "split": {"split_trajs": True},
    "padded": {"trajs_per_batch": 3},
    "one after the other": {"trajs_per_batch": 3, "traj_format": "cat"},
    "compact": {"compact_obs": True},
    "batch first": {"memory_order": "batch"},
}


@pytest.mark.parametrize("form", DELIVERED)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_groups_keep_the_batch_dimensions_of_their_agents(kind, form):
    """As `batch["cars"].batch_size` has them with TorchRL, however frames are delivered."""

    def make():
        return kit.Teams((2,))

    envs = make() if kind is Collector else [make] * 2
    with kind(envs, kit.teams_policy(), frames_per_batch=40, **DELIVERED[form]) as collector:
        for batch in (collector.next(), collector.next()):
            for name, agents in kit.GROUPS.items():
                for key in (name, ("next", name)):
                    assert batch.get(key).batch_size == (*batch.batch_size, agents)


def test_where_no_flag_is_at_the_root_it_says_whether_any_part_ended():
    with Collector(kit.Teams((2,), at_root=False), kit.teams_policy(), frames_per_batch=60) as c:
        batch = c.next()
        parts = torch.cat([batch["next", name, "done"] for name in kit.GROUPS], -2)
        ids, done = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
        assert torch.equal(done, parts.flatten(2).any(-1))
        assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
        assert (
            batch["next", "done"] == batch["next", "terminated"] | batch["next", "truncated"]
        ).all()
        assert c.stats()["episodes"] == int(done.sum())


@pytest.mark.parametrize("form", FORMS)
def test_statistics_count_all_rewards(form):
    with Collector(kit.Teams((2,), **FORMS[form]), kit.teams_policy(), frames_per_batch=80) as c:
        batch = c.next()
        rewards = sum(batch["next", name, "reward"].sum((-2, -1)) for name in kit.GROUPS)
        ids, done = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
        returns = [float(rewards[ids == one].sum()) for one in ids[done].unique()]
        assert c.stats()["return"]["mean"] == pytest.approx(sum(returns) / len(returns), rel=1e-5)


def test_a_limit_counts_steps_as_torchrl_does():
    options = {"frames_per_batch": 40, "max_frames_per_traj": 5}
    expected = theirs(kit.Teams((2,), parts=False), kit.teams_policy(), **options)
    with Collector(kit.Teams((2,), parts=False), kit.teams_policy(), **options) as c:
        for others in expected:
            compare(c.next(), others, "ends as a whole")
    assert others["next", "truncated"].any()
    assert others["next", "terminated"].any()


def test_a_limit_truncates_all_parts_and_counts_steps_beside_their_flags():
    env = kit.Teams((2,), at_root=False)
    with Collector(env, kit.teams_policy(), frames_per_batch=40, max_frames_per_traj=3) as c:
        batch = torch.cat([c.next(), c.next()], 1)
    step = torch.arange(40).expand(2, 40) % 3
    assert torch.equal(batch["next", "truncated"][..., 0], step == 2)
    for name, agents in kit.GROUPS.items():
        each = step[..., None, None].expand(2, 40, agents, 1)
        assert torch.equal(batch[name, "step_count"], each)
        assert torch.equal(batch["next", name, "step_count"], each + 1)
        assert torch.equal(batch["next", name, "truncated"], each == 2)
        assert torch.equal(batch["next", name, "done"], each == 2)
        assert torch.equal(batch[name, "age"], each[..., 0])
    assert "step_count" not in batch.keys()


@pytest.mark.parametrize(
    "options", [{"set_truncated": True}, {"reset_at_each_iter": True}], ids=str
)
def test_the_last_step_of_a_batch_is_truncated_in_all_parts(options):
    with Collector(
        kit.Teams((2,), at_root=False), kit.teams_policy(), frames_per_batch=6, **options
    ) as c:
        batch = c.next()
    for name in kit.GROUPS:
        assert batch["next", name, "done"][:, -1].all()
        assert not batch["next", name, "done"][:, :-1].any()
        assert torch.equal(batch["next", name, "truncated"], batch["next", name, "done"])


def test_whole_trajectories_of_envs_that_end_in_parts():
    options = {"trajs_per_batch": 4, "traj_format": "cat", "frames_per_batch": 20}
    with Collector(kit.Teams((2,), at_root=False), kit.teams_policy(), **options) as c:
        batch = c.next()
    ids = batch["collector", "traj_ids"]
    assert len(ids.unique()) == 4
    last = torch.cat([ids[1:] != ids[:-1], torch.ones(1, dtype=torch.bool)])
    assert torch.equal(batch["next", "done"][:, 0], last)


CUT = {
    "split": {"split_trajs": True},
    "whole": {"trajs_per_batch": 2},
    "whole, end to end": {"trajs_per_batch": 2, "traj_format": "cat"},
}


@pytest.mark.parametrize("options", CUT.values(), ids=CUT)
def test_agents_keep_their_dimension_in_trajectories(options):
    def made():
        env = kit.Teams((2,), parts=False)
        return Collector(env, kit.teams_policy(), frames_per_batch=20, **options)

    def check(batch):
        for name, agents in kit.GROUPS.items():
            for part in (batch[name], batch["next", name]):
                assert part.batch_size == (*batch.batch_size, agents)

    with made() as collector, made() as resumed:
        check(collector.next())
        resumed.load_state_dict(collector.state_dict())
        check(resumed.next())
        left = collector.partial()
        if left is not None:
            check(left)


def test_agents_keep_their_dimension_where_only_next_observations_are_below_next():
    with Collector(
        kit.Teams((2,), parts=False), kit.teams_policy(), frames_per_batch=20, compact_obs=True
    ) as collector:
        batch = collector.next()
    for name in kit.GROUPS:
        batch["next"].pop(name, None)
    whole = restore_next(batch)
    for name, agents in kit.GROUPS.items():
        assert whole["next", name].batch_size == (*batch.batch_size, agents)


def test_envs_that_ended_in_parts_are_stepped_no_more_on_demand():
    options = {"frames_per_batch": 20, "reset_when_done": False}
    with Collector(kit.Teams((2,)), kit.teams_policy(), **options) as c:
        data = torch.cat(list(c), 1)
    mask = data["collector", "mask"]
    assert mask.sum(1).tolist() == [4, 7]
    for name in kit.GROUPS:
        assert (data["next", name, "reward"][~mask] == 0).all()
        assert data["next", name, "age"][mask].max() == 7


class EndsForGood(kit.Teams):
    """Raises if it is stepped after its end."""

    def __init__(self, life):
        self.life, self.over = life, False
        super().__init__()

    def limits(self, name):
        return torch.full_like(super().limits(name), self.life)

    def _step(self, td):
        assert not self.over, "it had ended"
        after = super()._step(td)
        self.over = bool(after["done"].any())
        return after


@pytest.mark.parametrize("group", [list, ParallelEnv])
def test_an_env_that_ended_is_stepped_no_more_while_others_go_on(group):
    makers = [lambda: EndsForGood(3), lambda: EndsForGood(8)]
    envs = ParallelEnv(2, makers) if group is ParallelEnv else makers
    options = {"frames_per_batch": 10, "reset_when_done": False}
    with Collector(envs, kit.teams_policy(), **options) as collector:
        data = torch.cat(list(collector), 1)
    assert data["collector", "mask"].sum(1).tolist() == [3, 8]


def make_teams():
    return kit.Teams((2, 3), at_root=False)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_deliver_the_same(kind):
    options = {"frames_per_batch": 120 // (1 + (kind is MultiAsyncCollector)), "seed": 0}
    with kind([make_teams] * 2, kit.teams_policy(), **options) as collector:
        batches = [collector.next() for _ in range(2)]
    with Collector(make_teams(), kit.teams_policy(), frames_per_batch=60, seed=0) as alone:
        expected = alone.next()
    shape = (2, 2, 3, 10) if kind is MultiSyncCollector else (2, 3, 10)
    assert batches[0].batch_size == shape
    first = batches[0][0] if kind is MultiSyncCollector else batches[0]
    assert first["next", "cars"].batch_size == (2, 3, 10, 3)
    for key in expected.keys(True, True):
        if key[0] != "collector":
            assert torch.equal(first[key], expected[key]), key


@pytest.mark.parametrize(("cat_results", "shape"), [(0, (4, 3, 10)), (-1, (2, 3, 20))])
def test_batches_of_envs_in_two_dimensions_are_joined_along_either(cat_results, shape):
    with MultiSyncCollector(
        [make_teams] * 2, kit.teams_policy(), frames_per_batch=120, cat_results=cat_results
    ) as collector:
        batch = collector.next()
    assert batch.batch_size == shape
    assert batch["cars", "observation"].shape == (*shape, 3, 2)
