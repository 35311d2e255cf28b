"""Several processes share minibatches of a size that they choose together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_well

SCRIPT = Path(__file__).with_name("batch_sizes.py")


@pytest.mark.slow
@pytest.mark.parametrize("samples", ["minibatch", "replicas"])
def test_processes_draw_parts_of_the_same_minibatch(samples, tmp_path):
    run_well(SCRIPT, 2, tmp_path, samples)
    first, second = (json.loads((tmp_path / f"parts-{rank}.json").read_text()) for rank in range(2))
    assert [len(part) for part in first] == [len(part) for part in second]
    assert len({len(part) for part in first}) > 1
    rows = [row for part in first + second for row in part]
    assert len(rows) == len(set(rows))
