"""The text of an index with places for digests is to the byte the text of the record."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from safepoint.format.encoding import seal
from safepoint.format.index import Chunk, Index, IndexedItem, ObjectReference, Tensor
from safepoint.format.index_text import IndexText

_GENERATION = "step-000000000001-i000001-0badcafe"
_DIGEST = "0123456789abcdef" * 2

# Names that look like a place for a digest, or like the way in which one is filled.
_NAMES = st.one_of(
    st.sampled_from(['"digest": ""', '"digest": "%s"', "%s", "%", "%%d", '"tensors": []\n}', ""]), st.text()
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    lengths = draw(st.lists(st.integers(0, 5), max_size=3))
    chunks = draw(st.integers(0, 3))
    return Tensor(
        item=draw(_NAMES),
        name=draw(_NAMES),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        global_shape=tuple(lengths),
        offset=(0,) * len(lengths),
        shape=tuple(lengths),
        chunks=tuple(
            Chunk((row, row + 1), 0, 4096 + row, 1, f"{draw(st.integers(0, 1 << 100)):032x}") for row in range(chunks)
        ),
    )


@settings(max_examples=50)
@given(st.lists(tensors(), max_size=5), _NAMES)
def test_the_text_is_that_of_the_sealed_record(found: list[Tensor], name: str) -> None:
    index = Index(
        generation=_GENERATION,
        rank=0,
        world_size=1,
        header_bytes=4096,
        header_digest=_DIGEST,
        objects=(ObjectReference(_GENERATION, "rank-00000-of-00001.safetensors", 4096, _DIGEST),),
        items={name: IndexedItem("plain", {name: [1, {"$float": "0x1p+0"}]})},
        tensors=tuple(found),
    )
    digests = [chunk.digest.encode() for one in found for chunk in one.chunks]

    assert IndexText(found, [one.chunks for one in found]).seal(replace(index, tensors=()), digests) == seal(index)
