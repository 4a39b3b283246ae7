"""How tensors are divided over the ranks: what a restore promises where that is another way than at the save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch.distributed.tensor  # a division is asked for where it is loaded  # noqa: F401

from safepoint.catalog import examine_all, read_lineage
from safepoint.contract import Reason
from safepoint.restoring.topology import topology_reasons
from safepoint.restoring.validate import SavedState
from tests.restoring.ranks.jobs import Part, dealt, part_of, run_of, weights_at
from tests.warm import WarmPython

WORKER = Path(__file__).with_name("topology_worker.py")


@pytest.mark.timeout(320)
def test_another_division_over_the_same_ranks_is_told_and_no_division_is_taken_for_damage(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    leader, other = warm_python.run_ranks(WORKER, tmp_path, count=2, logs=tmp_path)
    assert (leader.returncode, other.returncode) == (0, 0), leader.errors + other.errors
    assert leader.output.splitlines() == [
        "one row: exact",
        "sub-mesh: exact",
        "replica of a sub-mesh: exact",
        "same: exact",
        "cut: refused topology how 'model' is divided",
        "cut otherwise: refused topology how 'model' is divided",
        "put together: refused topology how 'model' is divided",
        "permitted: same_data",
    ]


@pytest.mark.parametrize(
    ("recorded", "kind", "now", "found"),
    [
        ({"model": ["in rows"]}, "module", "in rows", None),
        ({"model": ["in rows", ""]}, "module", "", None),
        ({"model": ["in rows"]}, "module", "in columns", ("in rows", "in columns")),
        ({"model": ["", "in rows"]}, "module", "in columns", ("not divided or in rows", "in columns")),
        ({"model": ["in rows"]}, "module", "", ("in rows", "not divided")),
        ({}, "module", "in rows", ("not divided", "in rows")),
        ({"model": ["in rows"]}, "stateful", "", None),
        ({"model": ["in rows"]}, "stateful", "in columns", ("in rows", "in columns")),
        (None, "module", "in rows", None),
        ({"model": 3}, "module", "in rows", None),
    ],
)
def test_a_division_is_compared_with_those_that_the_manifest_lists(
    recorded: object, kind: str, now: str, found: tuple[str, str] | None
) -> None:
    """Spec: F7.1"""
    reasons = topology_reasons(saved_as(recorded), [part(kind, now)], world_size=2)
    expected = [] if found is None else [Reason("topology", "same_data", "how 'model' is divided", *found)]
    assert reasons == expected


def test_another_number_of_ranks_is_told_once_and_not_as_another_division_as_well() -> None:
    saved = saved_as({"model": ["in rows"]})
    assert topology_reasons(saved, [part("module", "in columns")], world_size=2)
    assert topology_reasons(saved, [part("module", "in columns")], world_size=4) == []
    assert topology_reasons(saved, [part("module", "")], world_size=1) == []


def saved_as(recorded: object) -> SavedState:
    """Return a checkpoint of two ranks whose manifest says this of divisions."""
    storage = run_of(1, world_size=2)
    (generation,) = examine_all(storage, read_lineage(storage))
    assert generation.manifest is not None
    saved = dealt(storage, generation.manifest, 2)[0]
    return replace(saved, manifest=msgspec.structs.replace(saved.manifest, mesh=recorded))


def part(kind: str, division: str) -> Part:
    made = part_of(0, 2, type=kind, division=division)
    made._whole = {name: values.shape for name, values in weights_at(0).items()}
    return made
