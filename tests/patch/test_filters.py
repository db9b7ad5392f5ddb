"""`include`, `exclude`, `rules` and saved plans choose sites; a typo is an error that names the nearest."""

from __future__ import annotations

import json

import pytest
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import PatchPlan

from .models import network


def sites(**options) -> list[str]:
    return [r.name for r in fl.explain(network(), **options).fused]


ALL = ["0", "2.fc", "2.fc2", "2.fc3", "3.0"]


def test_everything_by_default():
    assert sites() == ALL


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("*", ALL),
        ("2", ["2.fc", "2.fc2", "2.fc3"]),
        ("2.*", ["2.fc", "2.fc2", "2.fc3"]),
        ("2.fc2", ["2.fc2"]),
        (["0", "3"], ["0", "3.0"]),
        ("2.act", []),
        (lambda name, module: isinstance(module, nn.Linear) and name.endswith("fc"), ["2.fc"]),
        (lambda name, module: False, []),
    ],
)
def test_include_needs_the_sites_own_name_and_covers_a_subtree(include, expected):
    assert sites(include=include) == expected


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("2", ["0", "3.0"]),
        ("2.act", ["0", "2.fc2", "2.fc3", "3.0"]),
        ("1", ["2.fc", "2.fc2", "2.fc3", "3.0"]),
        (["0", "2"], ["3.0"]),
        (lambda name, module: isinstance(module, nn.Tanh), ["0", "2.fc", "2.fc2", "2.fc3"]),
    ],
)
def test_exclude_of_any_member_leaves_the_site_out(exclude, expected):
    assert sites(exclude=exclude) == expected


def test_exclusion_is_the_reason_in_the_report():
    report = fl.explain(network(), exclude="2.act")
    assert ("2.fc", "2.act is excluded") in [(r.name, r.reason) for r in report.skipped]


@pytest.mark.parametrize("call", [fl.patch_model, fl.explain])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "2.fcc2"}, r"include='2.fcc2' matches no module of this model; the nearest is '2.fc2'"),
        ({"exclude": ["0", "encoder.*"]}, r"exclude='encoder.\*' matches no module"),
        ({"rules": ["linear_ac"]}, r"no rule is named 'linear_ac'; did you mean 'linear_act'\?"),
    ],
)
def test_a_typo_is_an_error_that_names_the_nearest(call, options, message):
    with pytest.raises(ValueError, match=message):
        call(network(), **options)


def test_filters_of_the_wrong_kind():
    with pytest.raises(TypeError, match="include takes globs"):
        fl.patch_model(network(), include=[3])
    with pytest.raises(TypeError, match="exclude takes globs"):
        fl.patch_model(network(), exclude=3)


def test_rules_by_name():
    assert sites(rules=["linear_act"]) == ALL
    assert sites(rules=[]) == []


def test_a_saved_plan_is_repeated_exactly(tmp_path):
    plan = PatchPlan({"0": ["linear_act"], "2.fc2": ["linear_act"]}, {"": {"linear_act": "reference"}})
    plan.save(tmp_path / "plan.json")
    for source in (plan, plan.to_dict(), tmp_path / "plan.json", str(tmp_path / "plan.json")):
        model = fl.patch_model(network(), plan=source)
        assert [r.name for r in fl.explain(model).fused] == ["0", "2.fc2"]
    assert PatchPlan.load(json.loads((tmp_path / "plan.json").read_text())) == plan


def test_a_plan_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"the plan does not fit this model: it has no site 2.fc9 \(linear_act\)"):
        fl.patch_model(network(), plan=PatchPlan({"2.fc9": ["linear_act"]}))
    patched = fl.patch_model(network())
    with pytest.raises(ValueError, match=r"unpatch it first: already fused are .*2.fc2 \(linear_act\)"):
        fl.patch_model(patched, plan=PatchPlan({"0": ["linear_act"]}))
    again = PatchPlan({r.name: [r.rule] for r in fl.explain(patched).fused})
    assert fl.patch_model(patched, plan=again) is patched
    with pytest.raises(ValueError, match="a plan has 'sites'"):
        fl.patch_model(network(), plan={"site": {}})
    with pytest.raises(ValueError, match="version 99"):
        fl.patch_model(network(), plan={"version": 99, "sites": {}})
    held = {"version": 1, "sites": {"2.fc2": ["linear_act"]}}
    for stranger in ("", "2.fc2", "9"):  # not patched by this plan, inside of what is, not there
        with pytest.raises(ValueError, match=f"does not fit this model: it has routes for .*, '{stranger}'"):
            fl.patch_model(network(), plan={**held, "routes": {stranger: {"linear_act": "library"}}})
    fl.patch_model(network(), plan={**held, "routes": {"2": {"linear_act": "library"}}})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"sites": {"0": None}}, r"sites\['0'\] is a list of the names of rules, not None"),
        ({"sites": {"0": "linear_act"}}, r"sites\['0'\] is a list of the names of rules, not 'linear_act'"),
        ({"sites": {"0": [1]}}, r"sites\['0'\] is a list of the names of rules, not \[1\]"),
        ({"routes": [1]}, r"'routes' are those of each patched module by its name, not \[1\]"),
        ({"routes": None}, "'routes' are those of each patched module by its name, not None"),
        ({"routes": {"": 5}}, r"routes\[''\] are the routes of its ops by their names, not 5"),
        (
            {"routes": {"": {"mlp": "bogus"}}},
            r"routes\[''\]\['mlp'\] must be one of 'reference', 'library', 'triton', not 'bogus'",
        ),
        ({"routes": {"": {"mlp": "auto"}}}, "must be one of 'reference', 'library', 'triton', not 'auto'"),
        ({"routes": {"": {"mlp": ["library"]}}}, "must be one of 'reference', 'library', 'triton', not "),
    ],
)
def test_a_plan_that_makes_no_sense_is_an_error(entries, message):
    with pytest.raises(ValueError, match=message):
        PatchPlan.load({"version": 1, "sites": {}, **entries})
    with pytest.raises(ValueError, match=message):
        PatchPlan.load(PatchPlan(**entries))
