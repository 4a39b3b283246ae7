"""From what a user types to a storage, and to a run and its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from safepoint.errors import RequestError
from safepoint.format.asked import is_asked_text
from safepoint.storage.memory import MemoryStorage
from safepoint.storage.url import open_storage, parse_source


def test_paths_and_file_urls_name_the_same_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a run#1"
    first = open_storage(folder)
    first.make_root()
    first.publish("object", b"data")
    quoted = str(folder).replace(" ", "%20").replace("#", "%23")
    for url in (str(folder), f"file://{quoted}", f"file://localhost{quoted}", f"FILE://{quoted}"):
        storage = open_storage(url)
        assert storage.read("object", limit_bytes=4) == b"data"


def test_opening_creates_nothing(tmp_path: Path) -> None:
    assert not open_storage(tmp_path / "absent").root_exists()
    assert list(tmp_path.iterdir()) == []


def test_each_memory_url_is_a_storage_of_its_own() -> None:
    first, second = open_storage("memory://run"), open_storage("memory://run")
    assert isinstance(first, MemoryStorage)
    assert first.url == "memory://run"
    first.make_root()
    assert not second.root_exists()


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_object_stores_are_refused_with_the_reason(url: str) -> None:
    with pytest.raises(RequestError, match="object stores are not supported"):
        open_storage(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a\0b",
        "https://host/run",
        "~/runs/digits",
        "file://host/run",
        "file://[",
        "file://relative",
        "file:///run?x",
        "file:///run#x",
        "file:///a%00b",
        Path("s3://bucket/run"),
        Path("memory://run"),
        Path("file:///run"),
    ],
)
def test_what_would_become_a_wrong_folder_is_refused(url: str | Path) -> None:
    with pytest.raises(RequestError):
        open_storage(url)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/digits@1000", ("runs/digits", "1000")),
        ("runs/digits@0", ("runs/digits", "0")),
        ("runs/digits@007", ("runs/digits", "007")),
        ("runs/digits", ("runs/digits", None)),
        ("me@host/run", ("me@host/run", None)),
        ("me@host/run@5", ("me@host/run", "5")),
        ("run@5/", ("run@5/", None)),
        ("run@", ("run@", None)),
        ("run@latest", ("run@latest", None)),
        ("run@-1", ("run@-1", None)),
        ("run@٣", ("run@٣", None)),
        ("run@²", ("run@²", None)),
        ("s3://bucket/run@12", ("s3://bucket/run", "12")),
        ("run@step-000000000030-i000001-0badcafe", ("run", "step-000000000030-i000001-0badcafe")),
        ("run@step-30-i1-0badcafe", ("run@step-30-i1-0badcafe", None)),
    ],
)
def test_a_source_is_a_run_and_perhaps_a_step(text: str, expected: tuple[str, str | None]) -> None:
    assert parse_source(text, is_asked=is_asked_text) == expected


def test_a_source_without_a_run_is_refused() -> None:
    with pytest.raises(RequestError):
        parse_source("@5", is_asked=is_asked_text)
