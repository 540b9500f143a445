"""Layouts and digests: pure."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_rollout.errors import OwnerDamaged
from belayer_rollout.memory.digest import CHUNK_BYTES, chunk_digests, differing, root_digest, sample
from belayer_rollout.memory.layout import ALIGNMENT, DTYPE_BYTES, Layout, TensorSpec, plan_layout

specs = st.lists(
    st.builds(
        TensorSpec,
        st.text(min_size=1, max_size=8),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.sampled_from(["param", "buffer", "transient", "attribute"]),
    ),
    unique_by=lambda spec: spec.name,
)


@given(specs)
def test_tensors_are_aligned_and_never_overlap(given_specs: list[TensorSpec]) -> None:
    layout = plan_layout(given_specs)
    end = 0
    for name, place in layout.tensors.items():
        assert place.offset % ALIGNMENT == 0, name
        assert place.offset >= end
        end = place.offset + place.num_bytes
    assert end <= layout.num_bytes < end + ALIGNMENT
    assert [(n, p.shape, p.dtype, p.kind) for n, p in layout.tensors.items()] == [
        tuple(s) for s in given_specs
    ]


@given(specs)
def test_a_layout_comes_back_from_its_text(given_specs: list[TensorSpec]) -> None:
    aliases = {f"{spec.name}/alias": spec.name for spec in given_specs[:2]}
    aliases = {alias: name for alias, name in aliases.items() if alias not in {s.name for s in given_specs}}
    layout = plan_layout(given_specs, aliases)
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"tensors": [["a", 0, [2], "float32", "param"], ["b", 0, [2], "float32", "param"]], "aliases": {}}',
        b'{"tensors": [["a", 8, [2], "float32", "param"]], "aliases": {}}',
        b'{"tensors": [["a", 0, [2], "float31", "param"]], "aliases": {}}',
        b'{"tensors": [["a", 0, [-2], "float32", "param"]], "aliases": {}}',
        b'{"tensors": [], "aliases": {"b": "a"}}',
    ],
)
def test_a_layout_that_is_none_is_damage(text: bytes) -> None:
    with pytest.raises(OwnerDamaged):
        Layout.from_json(text)


@pytest.mark.parametrize(
    ("wrong", "aliases"),
    [
        ([TensorSpec("a", (1,), "int8"), TensorSpec("a", (2,), "int8")], {}),
        ([TensorSpec("a", (1,), "complex64")], {}),
        ([TensorSpec("a", (1,), "int8")], {"b": "c"}),
        ([TensorSpec("a", (1,), "int8")], {"a": "a"}),
    ],
)
def test_what_cannot_be_laid_out_is_refused(wrong: list[TensorSpec], aliases: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"\b[ab]\b"):
        plan_layout(wrong, aliases)


def test_one_changed_byte_is_found_in_its_chunk() -> None:
    data = bytearray(random.Random(1).randbytes(3 * CHUNK_BYTES + 17))

    def read(start: int, stop: int) -> bytearray:
        return data[start:stop]

    digests = chunk_digests(read, len(data))
    assert len(digests) == 4
    assert differing(read, len(data), digests, range(4)) == []
    data[-1] ^= 1
    data[CHUNK_BYTES] ^= 1
    assert differing(read, len(data), digests, range(4)) == [1, 3]
    assert root_digest(chunk_digests(read, len(data))) != root_digest(digests)


@given(st.integers(0, 300), st.one_of(st.none(), st.integers(0, 40)), st.integers(0, 99))
def test_a_sample_is_of_its_size_and_within_the_chunks(count: int, size: int | None, seed: int) -> None:
    chunks = sample(count, size, random.Random(seed))
    assert len(set(chunks)) == len(chunks) == (count if size is None else min(size, count))
    assert all(0 <= chunk < count for chunk in chunks)
    if size is not None and 2 <= size <= count:
        assert {0, count - 1} <= set(chunks)
