"""What travels to a worker, and how that which cannot is named."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from swath.errors import EnvError, UsageError
from swath.links.parcels import RemoteTraceback, pack, pack_error, unpack, unpack_error


def there_and_back(thing):
    return unpack(pack(thing, "it"))


def test_lambdas_closures_and_local_classes_travel():
    offset = 3

    class Local:
        def __init__(self, value):
            self.value = value + offset

    assert there_and_back(lambda x: x + offset)(4) == 7
    assert there_and_back(Local)(1).value == 4
    assert there_and_back(Local(2)).value == 5
    assert there_and_back(functools.partial(lambda a, b: a * b, 6))(7) == 42
    assert there_and_back(Local(1).__init__)(5) is None


def test_a_class_of_main_travels_by_value(monkeypatch):
    import __main__

    scope = {"__name__": "__main__"}
    exec("class Mine:\n    def get(self):\n        return 5", scope)
    monkeypatch.setattr(__main__, "Mine", scope["Mine"], raising=False)
    parcel = pack(scope["Mine"](), "it")
    monkeypatch.delattr(__main__, "Mine")
    assert unpack(parcel).get() == 5  # though `__main__` has no such class there


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def method(self):
        return self


def with_lock(lock):
    return lambda: lock


def with_default(value):
    return lambda lock=value: lock


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda lock: lock, "maker is a lock"),
        (lambda lock: Holder(inner=Holder(guard=lock)), "maker.inner.guard is a lock"),
        (lambda lock: {"a": [1, lock]}, "maker['a'][1] is a lock"),
        (with_lock, "maker > lock is a lock"),
        (with_default, "maker > lock is a lock"),
        (lambda lock: functools.partial(print, lock), "maker.args[0] is a lock"),
        (lambda lock: Holder(guard=lock).method, "maker.__self__.guard is a lock"),
        (lambda lock: with_lock(Holder(x=lock)), "maker > lock.x is a lock"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(wrap, path):
    with pytest.raises(UsageError) as caught:
        pack(wrap(threading.Lock()), "maker")
    assert path in str(caught.value)
    assert "policy_factory" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def test_open_files_and_modules_with_locks_are_named(tmp_path):
    with (tmp_path / "log").open("w") as file:
        with pytest.raises(UsageError, match="create_env_fn > file is a TextIOWrapper"):
            pack(lambda: file.name, "create_env_fn")
    policy = torch.nn.Sequential(torch.nn.Linear(2, 2))
    policy[0].guard = threading.Lock()
    with pytest.raises(UsageError, match=r"policy\._modules\['0'\]\.guard is a lock"):
        pack(policy, "policy")


def test_an_object_that_refuses_by_itself_is_named():
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("not me")

    with pytest.raises(UsageError, match=r"maker\.env is a Stubborn.*RuntimeError: not me"):
        pack(Holder(env=Stubborn()), "maker")


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


def test_errors_come_with_their_cause_and_the_traceback_of_the_other_process():
    error = raised(EnvError("the env raised", worker=1, env=2, step=3, seed=4), KeyError("mass"))
    back = unpack_error(pack_error(error))
    assert str(back) == "the env raised [worker 1, env 2, step 3, seed 4]"
    assert (back.worker, back.env, back.step, back.seed) == (1, 2, 3, 4)
    assert isinstance(back.__cause__, KeyError)
    assert isinstance(back.__cause__.__cause__, RemoteTraceback)
    assert "in raised" in str(back.__cause__.__cause__)
    alone = unpack_error(pack_error(raised(KeyError("x"))))
    assert isinstance(alone, KeyError)
    assert "in raised" in str(alone.__cause__)


class Picky(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_errors_that_do_not_pickle_are_told_in_words():
    back = unpack_error(pack_error(raised(Picky(1, 2), KeyError("x"))))
    assert isinstance(back, RuntimeError)
    assert str(back) == "Picky: 1 and 2"
    assert isinstance(back.__cause__, KeyError)
    error = KeyError("x")
    error.lock = threading.Lock()
    assert "KeyError" in str(unpack_error(pack_error(raised(error))))
