"""The environment of processes that hold a model."""

import pytest

from supervisor.runtime.launch import child_environment


def test_heaps_of_model_processes_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert child_environment(with_model=True)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "GLIBC_TUNABLES" not in child_environment(with_model=False)


def test_tunables_of_the_operator_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    both = "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    assert child_environment(with_model=True)["GLIBC_TUNABLES"] == both
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert child_environment(with_model=True)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
