"""What only a CUDA device can show."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from device_kit import Remembering, Steps, Whole, assert_same, flat, waiting_is_an_error
from torch import nn

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import GymEnv, SerialEnv, TorchCartPole, TorchPendulum
from swath.errors import PolicyError, UsageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)


def compiles(test):
    """Lets the compiler warn of what is its own, and have its time."""
    for what in ("ignore::DeprecationWarning", "ignore:TensorFloat32:UserWarning"):
        test = pytest.mark.filterwarnings(what)(test)
    return pytest.mark.timeout(180)(test)


class Sampling(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation):
        logits = self.net(observation)
        noise = torch.empty_like(logits).exponential_().log()
        return (logits - noise).argmax(-1), {"log_prob": logits.log_softmax(-1).amax(-1)}


class Coin(nn.Module):
    """Tosses a coin, whatever it sees."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return (torch.rand_like(observation[..., 0]) + self.bias > 0.5).long()


def batches(count, env, policy, **options):
    options = {"frames_per_batch": 16 * 8, "seed": 5, **options}
    with Collector(env, policy, **options) as collector:
        return [collector.next() for _ in range(count)]


def test_whole_rollouts_stay_on_the_device_and_are_one_graph():
    with Collector(TorchCartPole(8, CUDA), Sampling().to(CUDA), frames_per_batch=64) as collector:
        batch = collector.next()
        assert batch["observation"].device == CUDA
        assert "one CUDA graph" in collector.describe()
        assert "nothing is copied between host and device" in collector.describe()


@pytest.mark.parametrize("make", [TorchCartPole, TorchPendulum, Steps])
def test_with_and_without_the_graph_the_data_are_equal(make):
    def collected(**options):
        torch.manual_seed(1)
        policy = {TorchCartPole: Sampling, Steps: lambda: Whole(5)}.get(
            make, lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))
        )()
        policy.to(CUDA)
        options = {"frames_per_batch": 33 * 32, "total_frames": 33 * 100, "seed": 3, **options}
        out = []
        with Collector(make(33, CUDA, 20), policy, **options) as collector:
            for batch in collector:
                out.append(batch)
                for weight in policy.parameters():
                    weight.data.mul_(0.9)
                collector.update_policy_weights_()
            assert ("one CUDA graph" in collector.describe()) == (options["cudagraph"] is True)
        return out

    eager, graphed = collected(cudagraph=False), collected(cudagraph=True)
    assert len(eager) == 4
    assert eager[-1].batch_size[-1] == 4
    for ours, theirs in zip(graphed, eager, strict=True):
        assert_same(ours, theirs)
    assert graphed[1]["collector", "policy_version"].unique().tolist() == [1]


def test_every_replay_draws_fresh_noise():
    tosses = [
        flat(batch)["action"].double()
        for batch in batches(50, Steps(64, CUDA), Coin().to(CUDA), frames_per_batch=64 * 32)
    ]
    mean = torch.stack(tosses).mean().item()
    assert abs(mean - 0.5) < 5 * 0.5 / (50 * 64 * 32) ** 0.5
    for first, second in itertools.pairwise(tosses):
        assert not torch.equal(first, second)
        same = (first == second).double().mean().item()
        assert abs(same - 0.5) < 5 * 0.5 / (64 * 32) ** 0.5


@pytest.mark.parametrize("options", [{}, {"cudagraph": False}, {"max_frames_per_traj": 7}])
def test_a_rollout_never_waits_for_the_device(options):
    policy = Sampling().to(CUDA)
    with Collector(TorchCartPole(64, CUDA), policy, frames_per_batch=640, **options) as collector:
        collector.next()
        batch = collector.next()
        with waiting_is_an_error():
            for _ in range(3):
                batch = collector.next()
                collector.update_policy_weights_()
        assert batch["collector", "policy_version"].unique().tolist() == [2]


@pytest.mark.parametrize("cudagraph", [False, True])
def test_kept_batches_never_change_and_memory_stays_flat(cudagraph):
    policy = Sampling().to(CUDA)
    env = TorchCartPole(256, CUDA)
    with Collector(env, policy, frames_per_batch=256 * 16, cudagraph=cudagraph) as collector:
        kept = [collector.next() for _ in range(3)]
        copies = [flat(batch) for batch in kept]
        for _ in range(10):
            collector.next()
        for batch, copy in zip(kept, copies, strict=True):
            assert all(
                torch.equal(value.cpu(), copy[key]) for key, value in batch.items(True, True)
            )
        del kept, batch
        gc.collect()
        torch.cuda.synchronize()
        before, slabs = torch.cuda.memory_allocated(), collector.stats()["slabs"]
        for _ in range(200):
            collector.next()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
        assert collector.stats()["slabs"] == slabs


@pytest.mark.parametrize("places", list(itertools.product(["cpu", "cuda"], repeat=3)))
@pytest.mark.parametrize("policy", [Whole, Remembering, None])
def test_each_placement_gives_the_same_data(places, policy):
    env, computes, storing = places
    options = {"max_frames_per_traj": 9, "init_random_frames": 150}
    expected = batches(3, Steps(8), policy and policy(), **options)
    ours = batches(
        3,
        Steps(8),
        policy and policy(),
        env_device=env,
        policy_device=computes,
        storing_device=storing,
        **options,
    )
    for batch, one in zip(ours, expected, strict=True):
        assert batch["action"].device.type == storing
        assert_same(batch, one)


@pytest.mark.parametrize(
    "options", [{"compact_obs": True}, {"reset_when_done": False}, {"split_trajs": True}]
)
def test_options_that_look_at_every_step_work_there_too(options):
    expected = batches(1, Steps(8), Whole(), **options)
    ours = batches(1, Steps(8, CUDA), Whole().to(CUDA), **options)
    for batch, one in zip(ours, expected, strict=True):
        assert_same(
            batch.exclude(("collector", "final_obs")), one.exclude(("collector", "final_obs"))
        )


def gym_batches(count, policy, **options):
    env = SerialEnv(8, "CartPole-v1")
    return batches(count, env, policy, frames_per_batch=8 * 32, **options)


class Rule(nn.Module):
    """Exact on every device."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.0, 0.0, 1.0, 1.0]))

    def forward(self, observation):
        return (observation[..., 2] * self.weight[2] > 0).long()


@compiles
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cudagraph_policy": True},
        {"storing_device": "cuda"},
        {"compile_policy": True},
        {"compile_policy": True, "cudagraph_policy": True},
    ],
)
def test_gymnasium_envs_with_a_policy_on_the_gpu(options):
    expected = gym_batches(4, Rule())
    for batch, one in zip(gym_batches(4, Rule().to(CUDA), **options), expected, strict=True):
        assert_same(batch, one)


@compiles
@pytest.mark.parametrize("cudagraph", [False, "auto"])
def test_a_compiled_policy_beside_its_envs_gives_the_same_data(cudagraph):
    compiled = {"compile_policy": True, "cudagraph": cudagraph}
    torch.compiler.reset()
    given = batches(4, Steps(8, CUDA), Whole().to(CUDA), **compiled)
    for batch, one in zip(given, batches(4, Steps(8, CUDA), Whole().to(CUDA)), strict=True):
        assert_same(batch, one)


def test_a_graphed_policy_draws_fresh_noise_and_follows_its_weights():
    policy = Coin().to(CUDA)
    env = SerialEnv(8, "CartPole-v1")
    options = {"frames_per_batch": 8 * 250, "cudagraph_policy": True}
    with Collector(env, policy, **options) as collector:
        tosses = collector.next()["action"].double()
        assert abs(tosses.mean().item() - 0.5) < 5 * 0.5 / 2000**0.5
        assert len({tuple(row) for row in tosses.T.tolist()}) > 150
        policy.bias.data.fill_(2.0)
        assert collector.next()["action"].all()
        assert "as one CUDA graph" in collector.describe()


class Waiting(nn.Module):
    def forward(self, observation):
        return (observation[:, 0] > float(observation.sum() > 1e9)).long()


def test_what_waits_for_the_device_is_no_graph_and_says_so():
    with Collector(TorchCartPole(4, CUDA), Waiting(), frames_per_batch=64) as collector:
        for _ in range(3):
            collector.next()
        assert "step by step: it waits for the device" in collector.describe()
        torch.rand(1, device=CUDA)  # the generator still works
    with pytest.raises(UsageError, match="waits for the device"):
        Collector(TorchCartPole(4, CUDA), Waiting(), frames_per_batch=64, cudagraph=True)
    with pytest.warns(UserWarning, match="cudagraph_policy has no effect: it waits"):
        gym_batches(1, Waiting(), policy_device="cuda", cudagraph_policy=True)


class Epsilon(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = 0

    def forward(self, observation):
        return torch.full_like(observation[:, 0], self.value).long()


def test_a_number_that_python_holds_is_followed():
    policy = Epsilon()
    with Collector(Steps(4, CUDA), policy, frames_per_batch=64) as collector:
        for value in (0, 2, 1):
            policy.value = value
            assert collector.next()["action"].unique().tolist() == [value]


class Moving(Steps):
    def step(self, action):
        out = super().step(action)
        self.note = out[0]
        return out


def test_an_env_that_exchanges_its_tensors_is_no_graph():
    with Collector(Moving(4, CUDA), Whole().to(CUDA), frames_per_batch=64) as collector:
        collector.next()
        assert "each step exchanges note" in collector.describe()


@pytest.mark.parametrize("cudagraph", [False, "auto"])
def test_distributions_can_be_recorded(cudagraph):
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, observation):
            mean, scale = self.net(observation).chunk(2, -1)
            dist = torch.distributions.Normal(mean, scale.exp())
            action = dist.rsample()  # sample() asks the device whether all scales are positive
            return action, dist.log_prob(action)[..., 0]

    torch.manual_seed(0)
    env, policy = TorchPendulum(4, CUDA), Actor().to(CUDA)
    with Collector(env, policy, frames_per_batch=64, cudagraph=cudagraph) as collector:
        collector.next()
        assert cudagraph is False or "one CUDA graph" in collector.describe()


def test_a_wrong_action_is_told_though_nobody_waits():
    class Wrong(nn.Module):
        def forward(self, observation):
            return (observation[:, 0] * 0).long() + 3 * (observation[:, 0] > 4).long()

    with Collector(Steps(4, CUDA), Wrong(), frames_per_batch=4 * 32) as collector:
        collector.next()
        torch.cuda.synchronize()
        with pytest.raises(PolicyError, match="not in the action space"):
            collector.next()


def test_the_callers_stream_device_and_generator_are_left_alone():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        collector = Collector(
            TorchCartPole(4096, CUDA), Sampling().to(CUDA), frames_per_batch=4096 * 16, seed=1
        )
        state = torch.cuda.get_rng_state()
        sums = []
        for _ in range(20):
            batch = collector.next()
            sums.append((batch["next", "reward"].sum(), batch))  # on this stream, at once
        assert torch.cuda.current_stream() == stream
        assert torch.equal(torch.cuda.get_rng_state(), state)
        for total, batch in sums:
            assert total.item() == batch["next", "reward"].sum().item() == batch.numel()
    collector.shutdown()


def test_a_state_goes_on_bit_for_bit():
    policy = Whole(7).to(CUDA)
    options = {"frames_per_batch": 16 * 8, "seed": 5}
    with Collector(Steps(8, CUDA), policy, **options) as collector:
        for _ in range(2):
            collector.next()
        state = collector.state_dict()
        expected = [collector.next() for _ in range(2)]
    with Collector(Steps(8, CUDA), policy, **{**options, "seed": 1}) as other:
        other.next()
        other.load_state_dict(state)
        for one in expected:
            assert_same(other.next(), one)


def test_stats_are_those_of_the_hosts_loop():
    def stats(device):
        with Collector(Steps(8), Whole(), frames_per_batch=256, seed=0, device=device) as collector:
            for _ in range(3):
                collector.next()
            return collector.stats()

    host, gpu = stats("cpu"), stats("cuda")
    assert host["episodes"] == gpu["episodes"] > 50
    for name in ("return", "length"):
        assert gpu[name]["mean"] == pytest.approx(host[name]["mean"])


def make_steps():
    return Steps(4)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("places", [("cpu", "cuda"), ("cuda", "cuda"), ("cuda", "cpu")])
def test_workers_on_the_gpu(kind, places):
    env, computes = places

    def collected(**options):
        policy = Whole()
        out = []
        options = {"frames_per_batch": 64, "seed": 2, "num_workers": 2, **options}
        with kind(make_steps, policy, **options) as collector:
            for number in range(6):
                if number == 3:
                    policy.net.bias.data.add_(1)
                    collector.update_policy_weights_(wait=True)
                out.append(collector.next())
            text = collector.describe()
        order = sorted(out, key=lambda b: b["collector", "traj_ids"].flatten()[0].item())
        return (order if kind is MultiAsyncCollector else out), text

    if kind is MultiAsyncCollector:
        _, text = collected(env_device=env, policy_device=computes)
    else:
        expected, _ = collected()
        ours, text = collected(env_device=env, policy_device=computes, storing_device="cuda")
        for batch, one in zip(ours, expected, strict=True):
            assert batch["action"].device == CUDA
            assert_same(batch, one)
    assert ("CUDA IPC" in text) == (computes == "cuda")


@pytest.mark.timeout(180)
def test_a_learner_on_the_gpu_feeds_workers_there():
    makers, policy = [lambda: GymEnv("CartPole-v1")] * 2, Rule().to(CUDA)
    with MultiSyncCollector(makers, policy, frames_per_batch=64) as one:
        one.update_policy_weights_(wait=True)
        assert one.next()["collector", "policy_version"].unique().tolist() == [1]
        assert "CUDA IPC" in one.describe()
