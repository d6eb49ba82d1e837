"""The soak counts wrong tokens, and finds none."""

from __future__ import annotations

import pytest

from cufuse import device, engines
from cufuse.benchmarks.soak import soak

pytestmark = pytest.mark.gpu

OPTIONS = {"context": 5, "n_tokens": 16, "dtype": device.bfloat16, "kind": "cupy"}


@pytest.mark.parametrize("engine", ["mega", "fused"])
def test_every_pass_draws_the_same(engine):
    assert soak("tiny", engine=engine, steps=160, **OPTIONS) == 0


def test_another_token_is_counted(monkeypatch):
    mega = engines.get("mega")
    honest = mega.step_and_draw

    def dishonest(*args, ids, **options):
        made = honest(*args, ids=ids, **options)
        ids += 1
        ids %= 512
        return made

    monkeypatch.setattr(mega, "step_and_draw", dishonest)
    assert soak("tiny", engine="mega", steps=16, **OPTIONS) > 0
