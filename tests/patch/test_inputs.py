"""What `tune` gives its runs: as it was at first, whatever a run does to it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from fusedlayers.patch.inputs import Inputs


class Cache:
    def __init__(self, *held):
        self.held = list(held)


def test_each_run_finds_a_cache_of_its_own():
    cache = Cache(torch.zeros(2))
    inputs = Inputs((cache,), {})
    for _ in range(2):
        ((mine,), _) = inputs.fresh()
        assert len(mine.held) == 1 and not mine.held[0].any()
        mine.held[0].add_(1.0)
        mine.held.append(None)
    inputs.settle()
    assert inputs.edited and len(cache.held) == 1 and not cache.held[0].any()


class CallableCache(Cache):
    def __call__(self):
        return len(self.held)


def test_a_cache_that_may_be_called_is_one_too():
    cache = CallableCache()
    ((mine,), _) = Inputs((cache,), {}).fresh()
    mine.held.append(1)
    assert cache() == 0 and mine() == 1


def test_what_is_read_alone_is_not_cloned_again():
    x = torch.randn(2, 3)
    inputs = Inputs((x,), {"mask": None})
    inputs.fresh()
    inputs.settle()
    ((mine,), rest) = inputs.fresh()
    assert not inputs.edited and mine.data_ptr() == x.data_ptr() and rest == {"mask": None}


def test_who_gave_them_may_go_on_to_edit_them():
    x = torch.zeros(3)
    inputs = Inputs((x,), {}, lasting=True)
    x.add_(1.0)
    ((mine,), _) = inputs.fresh()
    assert not mine.any()


def test_one_tensor_given_twice_stays_one():
    x, cache = torch.randn(2), Cache()
    ((a, b, c, d), _) = Inputs((x, x, cache, cache), {}).fresh()
    assert a is b and c is d and c is not cache


@pytest.mark.parametrize("x", [torch.randn(1, 4).expand(3, 4), torch.randn(4, 6)[:, ::2], torch.randn(3, 2).t()])
def test_copies_lie_as_the_originals_do(x):
    for inputs in (Inputs((x,), {}), Inputs((x,), {}, lasting=True)):
        ((mine,), _) = inputs.fresh()
        assert mine.stride() == x.stride() and torch.equal(mine, x) and mine.data_ptr() != x.data_ptr()


def test_tensors_leave_their_graphs_and_may_be_edited_in_place():
    x = torch.randn(3, requires_grad=True)
    inputs = Inputs((x * 2, Cache(x * 3)), {})
    ((a, cache), _) = inputs.fresh()
    (a.mul_(2.0).sum() + cache.held[0].mul_(5.0).sum()).backward()
    assert x.grad is None and [t.grad.tolist() for t in inputs.wanted] == [[2.0] * 3, [5.0] * 3]


def test_modules_and_parameters_are_the_very_ones():
    layer = nn.Linear(2, 2)
    ((cache, weight), _) = Inputs((Cache(layer, layer.weight), layer.weight), {}).fresh()
    assert cache.held[0] is layer and cache.held[1] is weight is layer.weight


def test_what_cannot_be_copied_is_given_as_it_is():
    lock, x = Cache(threading.Lock()), torch.zeros(2)
    ((mine, tensors), _) = Inputs((lock, [x]), {}).fresh()
    assert mine is lock and tensors[0] is not x
    numbers = iter([1, 2])
    ((same,), _) = Inputs(((i for i in numbers),), {}).fresh()
    assert next(same) == 1


class Pair(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class Proxy:
    def __init__(self, held):
        self.held = held

    def __getattr__(self, name):
        return getattr(self.held, name)


MARK = object()


def test_what_does_not_come_back_from_a_copy_is_given_as_it_is():
    for value in (Pair(1, 2), Proxy(3), MARK):
        ((mine, tensor), _) = Inputs((value, torch.zeros(2)), {}).fresh()
        assert mine is value and not tensor.any()


@pytest.mark.parametrize("write", [lambda x: x.data.add_(1.0), lambda x: x.numpy().__iadd__(1.0)])
def test_writes_that_torch_does_not_count_are_seen(write):
    inputs = Inputs((torch.zeros(2),), {})
    ((mine,), _) = inputs.fresh()
    write(mine)
    inputs.settle()
    assert inputs.edited


def test_what_has_no_comparison_counts_as_written_to():
    with torch.inference_mode():
        inputs = Inputs((torch.eye(2).to_sparse(),), {})
        inputs.fresh()
        inputs.settle()
    assert inputs.edited


def test_writes_to_inference_tensors_are_seen():
    with torch.inference_mode():
        for edit in (False, True):
            inputs = Inputs((torch.zeros(2),), {})
            ((mine,), _) = inputs.fresh()
            mine.add_(float(edit))
            inputs.settle()
            assert inputs.edited is edit
