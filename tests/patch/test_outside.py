"""Generators that a forward must not move while it is traced."""

import random

import numpy
import pytest
from torch import nn

import fusedlayers as fl
from fusedlayers.patch.outside import Outside


def _draws_in_python():
    random.random()


def _draws_a_word():
    numpy.random.random()


def _draws_a_normal():
    numpy.random.standard_normal()


def _seeds():
    numpy.random.seed(5)


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.fc, self.act, self.draw = nn.Linear(4, 4), nn.ReLU(), draw

    def forward(self, x):
        self.draw()
        return self.act(self.fc(x))


@pytest.fixture(autouse=True)
def _kept():
    states = numpy.random.get_state(legacy=False), random.getstate(), numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(states[2])
    numpy.random.set_state(states[0])
    random.setstate(states[1])


def _next():
    """What the generators give next."""
    states = numpy.random.get_state(legacy=False), random.getstate()
    drawn = numpy.random.standard_normal(3).tolist(), random.random()
    numpy.random.set_state(states[0])
    random.setstate(states[1])
    return drawn


@pytest.mark.parametrize("stored", [False, True], ids=["", "a normal in store"])
@pytest.mark.parametrize("other", [False, True], ids=["", "another generator"])
@pytest.mark.parametrize("draw", [_draws_in_python, _draws_a_word, _draws_a_normal, _seeds])
def test_generators_are_put_back(draw, other, stored):
    if other:
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
    else:
        numpy.random.seed(3)
    if stored:
        numpy.random.standard_normal()
    before = _next()
    report = fl.explain(nn.Sequential(Drawing(draw)))
    assert _next() == before
    assert not report.fused
    assert any("draws random numbers" in r.reason for r in report.skipped)


def test_what_a_program_draws_between_is_no_ones_fault():
    numpy.random.seed(3)
    for _ in range(5):  # the second of two normals comes from store, and leaves the words as they were
        outside = Outside()
        outside.check()
        outside.restore()
        numpy.random.standard_normal()
    before = _next()
    outside = Outside()
    numpy.random.standard_normal()
    outside.restore()
    assert _next() == before
