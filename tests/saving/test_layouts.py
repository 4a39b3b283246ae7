"""What is kept of a layout from save to save follows the boxes that are held."""

from __future__ import annotations

from safepoint.saving.layout import Layouts, columns_of
from safepoint.state.item import CapturedTensor, TensorSpec
from safepoint.state.snapshot import SnapshotItem
from tests.crash.job import BytesSource


def snapshot(*shapes: tuple[int, ...]) -> list[SnapshotItem]:
    specs = [TensorSpec(f"t{number}", "uint8", shape, shape, (0,) * len(shape)) for number, shape in enumerate(shapes)]
    tensors = tuple(CapturedTensor(spec, BytesSource(b"")) for spec in specs)
    return [SnapshotItem("item", "plain", b"{}", tensors)]


def test_columns_are_those_of_the_last_snapshot() -> None:
    layouts = Layouts()
    digests = []
    for shapes in ([(2, 3)], [(2, 3)], [(2, 4)], [(2, 4), (1,)], [(2, 3)]):
        layout, _ = layouts.of(snapshot(*shapes))
        assert layouts.columns().digest == columns_of(layout).digest
        digests.append(layouts.columns().digest)
    assert digests[0] == digests[1] == digests[4] and len(set(digests)) == 3
