"""Results of the benchmark on a GPU: what counts as measured, and what a failed run may not do."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_card import settled_ms
from benchmarks.h200_book import Book, BrokenBookError

HEAD: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "aaaaaaaaaaaa",
    "card": "a card",
    "driver": "1",
    "machine": {"cores": 2, "memory_gib": 4, "python": "3", "torch": "2"},
}
FIGURE = {"what": "gap", "p50": 1.5, "p99": 2.5, "worst": 3.5, "unit": "ms", "target": "<= 100 ms",
          "count": 9, "note": ""}  # fmt: skip


def entry(commit: str, **more: object) -> dict[str, Any]:
    return {"text": "Deaths.", "figures": [FIGURE], "seconds": 1.0, "commit": commit,
            "date": HEAD["date"], **more}  # fmt: skip


def test_only_what_was_measured_at_this_commit_and_size_is_done(tmp_path: Path) -> None:
    book = Book.open(tmp_path)
    book.write_figures("kill", entry("aaaaaaaaaaaa"), HEAD)
    book.write_figures("batch", entry("bbbbbbbbbbbb"), HEAD)
    book.write_figures("standby", entry("aaaaaaaaaaaa", options={"kills": 3}), HEAD)
    again = Book.open(tmp_path)
    done = [n for n in again.entries if again.has(n, commit="aaaaaaaaaaaa", options={})]
    assert done == ["kill"]
    assert again.has("standby", commit="aaaaaaaaaaaa", options={"kills": 3})


def test_a_run_that_failed_leaves_the_figures_and_says_so(tmp_path: Path) -> None:
    book = Book.open(tmp_path)
    book.write_figures("kill", entry("bbbbbbbbbbbb"), HEAD)
    failure = {"error": "a text differs", "commit": "aaaaaaaaaaaa", "date": HEAD["date"]}
    book.write_failure("kill", "Deaths.", failure, HEAD)
    book.write_failure("speed", "Speed.", failure, HEAD)
    again = Book.open(tmp_path)
    assert again.entries["kill"]["figures"] == [FIGURE]
    assert "figures" not in again.entries["speed"]
    for name in ("kill", "speed"):
        assert not again.has(name, commit="aaaaaaaaaaaa", options={})
        assert not again.has(name, commit="bbbbbbbbbbbb", options={})
    page = (tmp_path / "h200.md").read_text("utf-8")
    assert "| gap | 9 | 1.5 | 2.5 | 3.5 | ms | <= 100 ms |" in page
    assert page.count("failed: a text differs") == 2
    again.write_figures("kill", entry("aaaaaaaaaaaa"), HEAD)
    assert Book.open(tmp_path).has("kill", commit="aaaaaaaaaaaa", options={})


@pytest.mark.parametrize("content", ["{", "[]", '{"experiments": []}', '{"experiments": {"a": 1}}'])
def test_a_broken_file_is_named_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "h200.json"
    path.write_text(content, "utf-8")
    with pytest.raises(BrokenBookError, match=r"h200\.json") as caught:
        Book.open(tmp_path)
    assert "--out" in str(caught.value.hint)
    assert path.read_text("utf-8") == content


def test_the_files_that_are_published_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "docs" / "benchmarks"
    assert Book.open(folder).entries
    json.loads((folder / "h200_load.json").read_text("utf-8"))


def test_memory_is_back_when_it_is_what_it_stays() -> None:
    samples = [(0.9, 900.0), (1.1, 900.0), (1.2, 500.0), (1.3, 110.0), (1.4, 101.0), (2.0, 100.0)]
    assert settled_ms(samples, 1.0) == pytest.approx(300)
    assert settled_ms([(0.5, 100.0), (1.0, 100.0)], 0.8) == pytest.approx(200)
