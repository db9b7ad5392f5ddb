"""Code that a forward reaches in any way is held to what is asked of the forward itself."""

from __future__ import annotations

import collections
import contextvars
import cProfile
import functools
import gc
import itertools
import logging
import os
import random
import sys
import time
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl

from .models import twin

OTHER = types.ModuleType("some_other_module")
exec(
    """
import torch
from dataclasses import dataclass
FLAG, LOG = True, []
class Settings:
    flag = True
    def get(self):
        return self.flag
settings = Settings()
class Counter:
    n = 0
    def tick(self):
        self.n += 1
counter = Counter()
def asks_grad(x): return torch.relu(x) if torch.is_grad_enabled() else -x
def asks_kind(x): return torch.relu(x) if isinstance(x, torch.Tensor) else -x
def asks_torch(x): return torch.relu(x) if torch.is_tensor(x) else -x
def without_grad(x):
    with torch.no_grad():
        return torch.relu(x)
def logs(x):
    LOG.append(1)
    return torch.relu(x)
decorated = torch.no_grad()(torch.relu)
def flagged(x): return torch.relu(x) if FLAG else -x
def harmless(x, mask=None): return torch.relu(x) if mask is None else x * mask
""",
    vars(OTHER),
)
sys.modules[OTHER.__name__] = OTHER
FLAG, NUMBERS, QUEUE, COUNTS = True, [1.0], collections.deque(), collections.defaultdict(int)
TICKS, DRAWS, LOGGER = itertools.count(), random.Random(1), logging.getLogger("test_watch")
CONTEXT, ENVIRONMENT = contextvars.ContextVar("context", default=1.0), os.environ
is_on = torch.is_grad_enabled


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.fc2, self.act, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5)


def net(forward) -> nn.Module:
    torch.manual_seed(0)
    return type("Made", (Net,), {"forward": forward})()


def closure(f):
    return lambda self, x: f(self.fc(x)) + self.act(self.fc2(x))


def default(f):
    def forward(self, x, f=f):
        return f(self.fc(x)) + self.act(self.fc2(x))

    return forward


def table(f):
    held = {"f": f}
    return lambda self, x: held["f"](self.fc(x)) + self.act(self.fc2(x))


def partial(f):
    return closure(functools.partial(f))


def method(f):
    class Held:
        def __call__(self, x):
            return f(x)

    return closure(Held())


WAYS = (closure, default, table, partial, method)


def same(patched: nn.Module, original: nn.Module) -> None:
    x = torch.randn(3, 4)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            got, want = patched(x), original(x)
        torch.testing.assert_close(got, want)
        assert got.requires_grad == want.requires_grad
        if mode:
            p, o = (torch.autograd.grad(y.sum(), m.fc.parameters(), allow_unused=True)
                    for y, m in ((got, patched), (want, original)))  # fmt: skip
            assert [g is None for g in p] == [g is None for g in o]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", ["asks_grad", "asks_kind", "asks_torch", "without_grad", "decorated", "logs"])
def test_code_that_a_trace_cannot_see_through(name, way):
    original = net(way(getattr(OTHER, name)))
    patched = fl.patch_model(twin(original), on_fallback="ignore")
    OTHER.LOG.clear()
    same(patched, original)
    assert len(OTHER.LOG) == (4 if name == "logs" else 0)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_code_that_asks_nothing_stays_traced(way):
    original = net(way(OTHER.harmless))
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert len(fl.explain(patched).fused)
    same(patched, original)


def _module_function(self, x):
    return OTHER.asks_kind(self.fc(x)) + self.act(self.fc2(x))


def _alias(self, x):
    return self.act(self.fc(x)) if is_on() else self.fc(x)


def _looked_up(self, x):
    return self.act(self.fc(x)) if getattr(torch, "is_grad_enabled")() else self.fc(x)  # noqa: B009


@pytest.mark.parametrize("forward", [_module_function, _alias, _looked_up], ids=lambda f: f.__name__)
def test_other_names_of_a_question(forward):
    original = net(forward)
    same(fl.patch_model(twin(original), on_fallback="ignore"), original)


def _property(self, x):
    return self.act(self.fc(x)) if self.on else self.fc(x)


def test_a_property_that_asks():
    original = net(_property)
    type(original).on = property(lambda self: torch.is_grad_enabled())
    same(fl.patch_model(twin(original), on_fallback="ignore"), original)


def _tick(self, x):
    return self.act(self.fc(x)) * next(TICKS)


def _tick_object(self, x):
    OTHER.counter.tick()
    return self.act(self.fc(x))


def _queue(self, x):
    QUEUE.append(1)
    return self.act(self.fc(x))


def _count(self, x):
    COUNTS["n"] += 1
    return self.act(self.fc(x))


def _log(self, x):
    LOGGER.info("called")
    return self.act(self.fc(x))


def _warn(self, x):
    warnings.warn("called", stacklevel=1)
    return self.act(self.fc(x))


def _clock(self, x):
    return self.act(self.fc(x)) + time.perf_counter()


def _draw(self, x):
    return self.act(self.fc(x)) * DRAWS.random()


@pytest.mark.parametrize(
    "forward", [_tick, _tick_object, _queue, _count, _log, _warn, _clock, _draw], ids=lambda f: f.__name__
)
def test_what_each_call_moves_is_moved_by_each_call_and_by_no_trace(forward):
    def moved():
        return repr(TICKS), OTHER.counter.n, len(QUEUE), dict(COUNTS), DRAWS.getstate()

    before = moved()
    report = fl.explain(net(forward))
    assert not report.fused
    assert report.skipped
    assert moved() == before


def _nonlocal():
    count = 0

    def forward(self, x):
        nonlocal count
        count += 1
        return self.act(self.fc(x)) * count

    return forward


def _enclosing_list():
    seen = []

    def forward(self, x):
        seen.append(1)
        return self.act(self.fc(x))

    return forward


@pytest.mark.parametrize("make", [_nonlocal, _enclosing_list], ids=lambda f: f.__name__)
def test_what_an_enclosing_function_holds_is_not_written(make):
    forward = make()
    assert not fl.explain(net(forward)).fused
    assert forward.__closure__[0].cell_contents in (0, [])


def _flag(self, x):
    return self.act(self.fc(x)) if FLAG else self.fc(x)


def _number(self, x):
    return self.act(self.fc(x)) * len(NUMBERS)


def _module_flag(self, x):
    return self.act(self.fc(x)) if OTHER.FLAG else self.fc(x)


def _class_flag(self, x):
    return self.act(self.fc(x)) if OTHER.Settings.flag else self.fc(x)


def _object_flag(self, x):
    return self.act(self.fc(x)) if OTHER.settings.flag else self.fc(x)


def _method(self, x):
    return self.act(self.fc(x)) if OTHER.settings.get() else self.fc(x)


def _context(self, x):
    return self.act(self.fc(x)) * CONTEXT.get()


def _environment(self, x):
    return self.act(self.fc(x)) if ENVIRONMENT.get("FLAG_OF_A_TEST") else self.fc(x)


def _import(self, x):
    from some_other_module import FLAG

    return self.act(self.fc(x)) if FLAG else self.fc(x)


@pytest.mark.parametrize("forward", [_context, _environment, _import], ids=lambda f: f.__name__)
def test_settings_that_no_guard_could_hold(forward):
    assert not fl.explain(net(forward)).fused


def test_settings_of_an_enclosing_function():
    on, numbers = True, [1.0]

    def forward(self, x):
        return self.act(self.fc(x)) * len(numbers) if on else self.fc(x)

    original = net(forward)
    patched = fl.patch_model(twin(original), on_fallback="ignore")
    assert fl.explain(patched).fused
    same(patched, original)
    numbers.append(2.0)
    same(patched, original)
    on = False
    same(patched, original)
    assert sum(fl.explain(patched).fallbacks[""].values()) == 4


def test_class_attributes_and_methods_changed_later():
    class Other(Net):
        on = True

        @classmethod
        def is_on(cls):
            return cls.on

        def part(self, x):
            return self.act(self.fc(x))

        def forward(self, x):
            return self.part(x) if self.is_on() and self.__class__.on else self.fc2(x)

    def one(change):
        Other.on = True
        original = Other()
        patched = fl.patch_model(twin(original), on_fallback="ignore")
        assert fl.explain(patched).fused
        same(patched, original)
        assert not fl.explain(patched).fallbacks
        for model in (original, patched):
            change(model)
        same(patched, original)

    one(lambda model: setattr(Other, "on", False))
    one(lambda model: setattr(model, "part", model.fc))
    one(lambda model: setattr(Other, "part", lambda self, x: self.fc2(x)))


def _inside(self, x):
    return OTHER.flagged(self.fc(x)) + self.act(self.fc2(x))


@pytest.mark.parametrize(
    ("forward", "holder", "name", "value"),
    [
        (_flag, sys.modules[__name__], "FLAG", False),
        (_number, sys.modules[__name__], "NUMBERS", [1.0, 2.0]),
        (_module_flag, OTHER, "FLAG", False),
        (_class_flag, OTHER.Settings, "flag", False),
        (_object_flag, OTHER.settings, "flag", False),
        (_method, OTHER.settings, "flag", False),
        (_inside, OTHER, "FLAG", False),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_global_setting_changed_later(forward, holder, name, value, monkeypatch):
    original = net(forward)
    patched = fl.patch_model(twin(original), on_fallback="raise")
    same(patched, original)
    monkeypatch.setattr(holder, name, value)
    with pytest.raises(fl.patch.guards.FallbackError, match=f"global .*{name}.* has changed"):
        patched(torch.randn(3, 4))
    for module in patched.modules():
        if "_fusedlayers_site" in module.__dict__:
            module.__dict__["_fusedlayers_site"].on_fallback = "ignore"
    same(patched, original)


def test_a_childs_own_training_flag():
    original = net(lambda self, x: self.act(self.fc(F.dropout(x, self.drop.p, self.drop.training))))
    patched = fl.patch_model(twin(original), on_fallback="ignore")
    for model in (original, patched):
        model.drop.eval()
    same(patched, original)
    for model in (original, patched):
        model.eval().drop.train()
    torch.manual_seed(0)
    want = original(torch.ones(3, 4))
    torch.manual_seed(0)
    torch.testing.assert_close(patched(torch.ones(3, 4)), want)


def test_a_profiler_keeps_profiling():
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(event))
    try:
        fl.explain(net(_flag))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert seen
    with cProfile.Profile() as profile:
        fl.explain(net(_flag))
        abs(-1)
    assert any("abs" in str(row.code) for row in profile.getstats())


@pytest.mark.parametrize(
    "write",
    [
        lambda self: self.__dict__.update(seen=1),
        lambda self: vars(self).__setitem__("seen", 1),
        lambda self: object.__setattr__(self, "seen", 1),
        lambda self: object.__setattr__(self.fc, "seen", 1),
    ],
)
def test_attributes_set_behind_the_back(write):
    def forward(self, x):
        write(self)
        return self.act(self.fc(x))

    model = fl.patch_model(net(forward), on_fallback="ignore")
    model(torch.ones(3, 4))
    assert [m.seen for m in model.modules() if "seen" in m.__dict__] == [1]


def test_an_attribute_read_from_the_dict():
    original = net(lambda self, x: self.act(self.fc(x)) * (2 if "later" in self.__dict__ else 1))
    patched = fl.patch_model(twin(original), on_fallback="ignore")
    for model in (original, patched):
        model.later = True
    same(patched, original)


_collections = 0


def count_collections(phase, info):
    global _collections
    _collections += 1
    time.perf_counter()


def test_garbage_collection_is_no_part_of_the_forward():
    """Its callbacks, as profilers and test tools have them, may run at any allocation."""
    before = gc.get_threshold()
    gc.callbacks.append(count_collections)
    gc.set_threshold(1)
    try:
        model = net(lambda self, x: self.act(self.fc(x)))
        assert fl.explain(model).fused and gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(count_collections)
    assert _collections
