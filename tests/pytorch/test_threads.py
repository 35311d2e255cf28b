"""A range is shared among threads: of OpenMP if there are any, otherwise of Python."""

import threading

import pytest

from vsgd.torch import devices
from vsgd.torch.devices import openmp_parallel, share_range


@pytest.fixture(params=["OpenMP", "Python"])
def kind(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(devices, "openmp_parallel", lambda: None)
    elif openmp_parallel() is None:
        pytest.skip("torch has no OpenMP library with GOMP_parallel here")
    return request.param


@pytest.mark.parametrize("length", [0, 1, 5, 1000])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_number_of_the_range_is_in_exactly_one_part(kind, length, count):
    found = []
    share_range(lambda begin, end: found.extend(range(begin, end)), length, count)
    assert sorted(found) == list(range(length))


def test_several_threads_take_part(kind):
    both, names = threading.Barrier(2, timeout=60), set()

    def call(begin, end):
        if threading.get_ident() not in names:
            names.add(threading.get_ident())
            both.wait()  # returns only if another thread is here, too

    share_range(call, 100, 2)
    assert len(names) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_exceptions_reach_the_caller(kind, count):
    def call(begin, end):
        raise ArithmeticError("a part failed")

    with pytest.raises(ArithmeticError, match="a part failed"):
        share_range(call, 10, count)
