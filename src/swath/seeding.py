"""From one seed to the streams of all envs, and a private random state for a collector.

The stream of an env depends on the seed and on the env's global index alone, so the same seed
gives the same trajectories whatever the number of workers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["RandomState", "action_generator", "env_seed", "env_seeds"]

_numpy_global: Any = np.random  # its functions for the global generator have no type stubs

_STRIDE = 0x9E3779B1  # odd, so that i * _STRIDE mod 2**32 takes 2**32 different values


def env_seed(seed: int, index: int) -> int:
    """Return the seed of the env with this global index: 32 bits, no two indices share one.

    Examples:
        >>> len({env_seed(7, i) for i in range(1000)})
        1000
    """
    return env_seeds(seed, [index])[0]


def env_seeds(seed: int, indices: Iterable[int]) -> list[int]:
    """Return the seeds of the envs with these global indices; see `env_seed`."""
    base = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return [(base + index * _STRIDE) % 2**32 for index in indices]


def action_generator(seed: int | None, index: int) -> np.random.Generator:
    """Return the generator that draws random actions for the env with this global index."""
    entropy = np.random.SeedSequence(seed, spawn_key=(1, index))
    return np.random.Generator(np.random.PCG64(entropy))


class RandomState:
    """The random state of torch, numpy and `random` that a seeded collector owns.

    Inside `installed()` every global draw comes from here; outside, the caller's state is back.

    Args:
        seed: Of all of them.
        stream: The number of the collector's worker, or another that its draws are to depend on.
        gpu: A CUDA device whose generator is one of them, too.
    """

    def __init__(self, seed: int, stream: int = 0, gpu: torch.device | None = None) -> None:
        child = np.random.SeedSequence(seed, spawn_key=(2, stream) if stream else (2,))
        words = child.generate_state(3, np.uint64)
        self._torch = torch.Generator().manual_seed(int(words[0]) >> 1).get_state()
        self._gpu = gpu
        if gpu is not None:
            generator = torch.Generator(gpu).manual_seed(int(words[0]) >> 1)
            self._cuda = generator.get_state()
        self._numpy = np.random.MT19937(int(words[1]))
        self._normal: dict[str, Any] = {"has_gauss": 0, "gauss": 0.0}  # a normal drawn ahead
        self._python = random.Random(int(words[2])).getstate()

    @classmethod
    def from_global(cls, gpu: torch.device | None = None) -> RandomState:
        """Return a state that continues where the global generators stand now."""
        state = cls(0, gpu=gpu)
        if gpu is not None:
            state._cuda = torch.cuda.get_rng_state(gpu)
        state._torch = torch.get_rng_state()
        state._python = random.getstate()
        now: Any = np.random.get_state(legacy=False)
        if now["bit_generator"] == "MT19937":  # unless the user put another generator there
            state._numpy.state = now
            state._normal = {name: now[name] for name in state._normal}
        return state

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Swap this state in, and the caller's back at the end, come what may."""
        outer_torch, outer_python = torch.get_rng_state(), random.getstate()
        outer_bits = _numpy_global.get_bit_generator()
        outer_numpy = np.random.get_state(legacy=False)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        _numpy_global.set_bit_generator(self._numpy)
        np.random.set_state({**self._numpy.state, **self._normal})
        if self._gpu is not None:
            outer_cuda = torch.cuda.get_rng_state(self._gpu)
            torch.cuda.set_rng_state(self._cuda, self._gpu)
        try:
            yield
        finally:
            if self._gpu is not None:
                self._cuda = torch.cuda.get_rng_state(self._gpu)
                torch.cuda.set_rng_state(outer_cuda, self._gpu)
            self._torch, self._python = torch.get_rng_state(), random.getstate()
            now: Any = np.random.get_state(legacy=False)
            self._normal = {name: now[name] for name in self._normal}
            _numpy_global.set_bit_generator(outer_bits)
            np.random.set_state(outer_numpy)
            random.setstate(outer_python)
            torch.set_rng_state(outer_torch)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the three states."""
        return {
            "torch": self._torch.clone(),
            "numpy": self._numpy.state,
            "normal": dict(self._normal),
            "python": self._python,
            "cuda": None if self._gpu is None else self._cuda.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._torch = state["torch"].clone()
        self._numpy.state, self._normal = state["numpy"], dict(state["normal"])
        self._python = state["python"]
        if self._gpu is not None and state["cuda"] is not None:
            self._cuda = state["cuda"].clone()
