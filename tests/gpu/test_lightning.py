"""The Lightning callback on a device: mixed precision with gradient clipping and loss scaling."""

from __future__ import annotations

import pytest
import torch

from tests.test_lightning import PACKAGES, FusedLayers, data, fused, load, make, seeded, trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_mixed_precision_with_clipping(precision, tmp_path):
    cls, runs = make(PACKAGES[0]), {}
    options = {"precision": precision, "gradient_clip_val": 0.5, "accelerator": "gpu", "devices": 1}
    for name, more in (("plain", []), ("fused", [FusedLayers(report=False)])):
        module, run = seeded(cls), trainer(tmp_path / name, *more, **options)
        run.fit(module, data(), data())
        (scores,) = run.test(module, data(), verbose=False)
        assert bool(fused(module)) == bool(more)
        runs[name] = scores["test"], load(tmp_path / name / "last.ckpt")
    (plain_loss, plain), (fused_loss, patched) = runs.values()
    assert fused_loss == pytest.approx(plain_loss, abs=0.05)
    assert list(plain) == list(patched) and list(plain["state_dict"]) == list(patched["state_dict"])
    assert plain.get("MixedPrecision", {}).get("scale") == patched.get("MixedPrecision", {}).get("scale")
    resumed = seeded(cls)
    trainer(tmp_path / "resumed", epochs=3, **options).fit(resumed, data(), ckpt_path=tmp_path / "fused" / "last.ckpt")
    loaded = cls.load_from_checkpoint(tmp_path / "resumed" / "last.ckpt", map_location="cpu")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(loaded.parameters(), resumed.parameters(), strict=True))
