"""What travels to a worker, and how that which cannot is named."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from swath.errors import EnvError, UsageError
from swath.links import parcels
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


class Mute(Exception):
    def __str__(self):
        raise KeyError("no")


def test_an_error_that_cannot_say_anything_is_named():
    back = unpack_error(pack_error(raised(Mute(threading.Lock()))))
    assert str(back) == "Mute: (its message could not be read: KeyError)"


@pytest.mark.parametrize("cause", [None, KeyError("x")])
@pytest.mark.parametrize("big", [bytes(1 << 20), "x" * (1 << 20)])
def test_errors_of_any_size_come_whole_or_are_cut_to_their_words(big, cause, monkeypatch):
    error = raised(ValueError("the frame", big), cause)
    whole = pack_error(error)
    assert unpack_error(whole).args == ("the frame", big)
    monkeypatch.setattr(parcels, "_MOST_BYTES", 1 << 19)
    cut = pack_error(error)
    assert len(cut) < 100_000 < len(whole)
    back = unpack_error(cut)
    assert isinstance(back, ValueError)
    assert str(back).startswith("('the frame', ")
    assert "characters left out" in str(back)
    last = back
    while last.__cause__ is not None:
        last = last.__cause__
    assert "characters left out" in str(last)


def test_what_we_say_of_a_large_error_is_cut_and_keeps_where_it_was():
    cause = ValueError("x" * (1 << 20))
    error = EnvError(f"the env raised {cause}", worker=1, env=2, step=3, seed=4)
    back = unpack_error(pack_error(raised(error, cause)))
    assert (back.worker, back.env, back.step, back.seed) == (1, 2, 3, 4)
    assert len(str(back)) < 30_000
    assert str(back).endswith("[worker 1, env 2, step 3, seed 4]")
    assert back.__cause__.args == cause.args


def test_an_error_of_a_class_that_is_not_known_here_is_told_in_words(monkeypatch):
    parcel = pack_error(raised(Known("it is"), KeyError("x")))
    monkeypatch.delitem(globals(), "Known")
    back = unpack_error(parcel)
    assert (type(back), str(back)) == (RuntimeError, "Known: it is")
    assert isinstance(back.__cause__, KeyError)


class Known(Exception):
    """Of a module that only the worker has."""
