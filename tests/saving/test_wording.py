"""What a save says of boxes is what the index and the digests of items say of the same records."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.format.encoding import seal
from safepoint.format.index import Chunk, Index, IndexedItem, Tensor, decode_index
from safepoint.format.state_digest import item_digest, rank_share
from safepoint.saving.describe import Place, describe
from safepoint.saving.form import form_of
from safepoint.saving.increment import full
from safepoint.saving.layout import LayoutBox
from safepoint.saving.wording import Wording
from safepoint.state.snapshot import SnapshotItem

_ITEMS = ("model", "optimizer", "none")


@st.composite
def files(draw: st.DrawFn) -> list[Tensor]:
    names = draw(st.lists(st.tuples(st.sampled_from(_ITEMS[:2]), st.sampled_from("abc%é")), unique=True, max_size=6))
    counts = [draw(st.integers(0, 3)) for _ in names]
    digests = iter(f"{number:032x}" for number in range(99))
    return [
        Tensor(
            item,
            name,
            "float32",
            (count,),
            (0,),
            (count,),
            tuple(Chunk((row, row + 1), 0, 4096 + 4 * row, 4, next(digests)) for row in range(count)),
        )
        for (item, name), count in zip(names, counts, strict=True)
    ]


@settings(max_examples=50)
@given(files())
def test_digests_and_index_are_those_of_the_records(found: list[Tensor]) -> None:
    digests = [chunk.digest for one in found for chunk in one.chunks]
    trees = {name: IndexedItem("plain", {"of": name}) for name in _ITEMS}
    index = Index("step-000000000001-i000001-0badcafe", 0, 1, 4096, "0" * 32, (), trees, tuple(found))

    wording = Wording(found, [one.chunks for one in found], is_alone=True)

    assert wording.seal(msgspec.structs.replace(index, tensors=()), digests) == seal(index)
    for name, tree in trees.items():
        assert wording.digest_of(name, tree, digests) == item_digest(tree, [one for one in found if one.item == name])


@settings(max_examples=50)
@given(files(), st.sampled_from([None, 3]), st.sampled_from([None, 3]), st.booleans())
def test_shares_of_several_ranks_are_those_of_the_records(
    found: list[Tensor], tree_of: int | None, boxes_of: int | None, has_tree: bool
) -> None:
    # Of one tensor a rank may store several boxes.
    found = [
        msgspec.structs.replace(one, name="a", global_shape=(9,), offset=(place,)) for place, one in enumerate(found)
    ]
    digests = [chunk.digest for one in found for chunk in one.chunks]
    wording = Wording(found, [one.chunks for one in found], is_alone=False)
    assert sorted(wording.shared) == sorted({one.item for one in found})
    for name in _ITEMS:
        tree = ({"of": name},) if has_tree else None
        expected = rank_share(tree, [one for one in found if one.item == name], tree_of=tree_of, boxes_of=boxes_of)
        assert wording.share_of(name, tree, digests, tree_of=tree_of, boxes_of=boxes_of) == expected


ALONE = Place("step-000000000001-i000001-0badcafe", 0, 1, frozenset({"model", "plain"}))


@pytest.mark.parametrize(
    "place",
    [
        ALONE,
        replace(ALONE, rank=2, world_size=4),
        replace(ALONE, rank=2, world_size=4, trees=frozenset(), per_rank=frozenset({"model"})),
        replace(ALONE, rank=2, world_size=4, has_own_tree=frozenset({"model", "plain"})),
    ],
)
def test_what_is_described_with_the_wording_of_a_form_is_what_is_described_without(place: Place) -> None:
    boxes = [
        LayoutBox("model", name, dtype, shape, (0,) * len(shape), shape)
        for name, dtype, shape in [
            ("a", "int8", (3,)),
            ("b", "float32", (2, 5)),
            ("c", "float32", (0, 7)),
            ("d", "bool", ()),
        ]
    ]
    form = form_of(boxes, is_alone=place.world_size == 1)
    digests = [f"{number:032x}" for number in range(len(form.extents))]
    items = [SnapshotItem("model", "module", b'{"of":"model"}', ()), SnapshotItem("plain", "plain", b"[1]", ())]

    worded = describe(form, digests, items, place, full(form))
    plain = describe(replace(form, wording=None), digests, items, place, full(form))

    assert form.wording is not None
    assert (worded.text, worded.objects, worded.shares) == (plain.text, plain.objects, plain.shares)
    assert worded.text == seal(worded.record())
    assert worded.record().tensors == decode_index(worded.text, where="here").tensors
