"""Membership rules, on tables written by hand."""

import pytest

from supervisor.process.identity import BootId, Marker, ProcessId, own_boot_id
from supervisor.process.stat import ProcStat
from supervisor.process.tree import ProcessTree, select_members

OWN_PID = 50
ENGINE = Marker("0badcafe", "chat-a-1")
OTHER = Marker("0badcafe", "chat-b-1")
ROOT = ProcessId(100, 1000, own_boot_id())


def stat(pid: int, *, ppid: int = 1, session: int = 7, start_ticks: int = 2000) -> ProcStat:
    return ProcStat(pid, "x", "S", ppid, session, 0, 1, start_ticks)


def members(
    *others: ProcStat,
    root: ProcStat | None = None,
    markers: dict[int, Marker] | None = None,
    known: tuple[ProcessId, ...] = (),
    tree: ProcessTree | None = None,
) -> set[int]:
    leader = root or stat(100, ppid=OWN_PID, session=100, start_ticks=1000)
    ours = stat(OWN_PID, ppid=40, session=40, start_ticks=500)
    shell = stat(40, ppid=1, session=40, start_ticks=400)
    found = select_members(
        tree or ProcessTree(ROOT, ENGINE),
        {row.pid: row for row in (ours, shell, leader, *others)},
        known=known,
        marker_of=(markers or {}).get,
        own_pid=OWN_PID,
    )
    return {process.pid for process in found}


def test_the_root_is_a_member_whatever_it_claims() -> None:
    assert members(markers={100: OTHER}) == {100}


def test_descendants_count_across_sessions() -> None:
    child = stat(101, ppid=100, session=101)
    grandchild = stat(102, ppid=101, session=102)

    assert members(child, grandchild, stat(200)) == {100, 101, 102}


def test_the_session_of_the_root_counts_without_a_parent() -> None:
    assert members(stat(101, ppid=1, session=100)) == {100, 101}


def test_the_session_does_not_count_if_the_root_does_not_lead_it() -> None:
    guest = stat(100, ppid=OWN_PID, session=40, start_ticks=1000)

    assert members(stat(101, ppid=40, session=40), root=guest) == {100}


def test_an_escapee_is_found_by_its_marker_and_its_children_with_it() -> None:
    escapee = stat(300, ppid=1, session=300)
    its_child = stat(301, ppid=300, session=301)

    assert members(escapee, its_child, markers={300: ENGINE}) == {100, 300, 301}


def test_engines_of_a_zygote_are_not_members_of_the_zygote() -> None:
    engine = stat(101, ppid=100, session=101)
    worker_of_engine = stat(102, ppid=101, session=101)

    assert members(engine, worker_of_engine, markers={101: OTHER, 102: OTHER}) == {100}


def test_the_same_instance_of_another_state_directory_is_not_ours() -> None:
    assert members(stat(300), markers={300: Marker("deadbeef", ENGINE.instance)}) == {100}


def test_processes_older_than_the_root_are_not_even_asked() -> None:
    old = stat(99, ppid=1, session=100, start_ticks=999)

    assert members(old, markers={99: ENGINE}) == {100}


def test_nothing_belongs_to_a_root_whose_pid_has_a_new_owner_but_the_marked() -> None:
    stranger = stat(100, ppid=1, session=100, start_ticks=5000)
    its_child = stat(101, ppid=100, session=100, start_ticks=5001)
    escapee = stat(300, start_ticks=1500)

    assert members(stranger, its_child, escapee, root=stranger, markers={300: ENGINE}) == {300}


def test_a_reaped_root_keeps_its_session() -> None:
    gone = stat(900, session=900)  # a row that is not the root

    assert members(stat(101, ppid=1, session=100), root=gone) == {101}


def test_children_of_known_members_count_after_the_root_is_gone() -> None:
    known = ProcessId(101, 2000, own_boot_id())
    child = stat(101, ppid=1, session=101)
    new = stat(102, ppid=101, session=102)
    gone = stat(900, session=900)

    assert members(child, new, root=gone, known=(known,)) == {101, 102}
    reused = ProcessId(101, 1999, own_boot_id())
    assert members(child, new, root=gone, known=(reused,)) == set()


def test_we_and_our_ancestors_are_never_members() -> None:
    ours = ProcStat(OWN_PID, "x", "S", 100, 100, 0, 1, 5000)
    with pytest.raises(ValueError, match="refusing"):
        members(ours)


def test_we_are_not_killed_through_a_marker_that_we_inherited() -> None:
    young = stat(OWN_PID, ppid=40, session=40, start_ticks=3000)

    assert members(young, markers={OWN_PID: ENGINE}) == {100}


def test_without_a_marker_only_parents_and_session_count() -> None:
    tree = ProcessTree(ROOT, None)
    child = stat(101, ppid=100, session=101)

    assert members(child, stat(300), markers={101: OTHER, 300: ENGINE}, tree=tree) == {100, 101}


def test_nothing_outlives_a_boot() -> None:
    old = ProcessTree(ProcessId(100, 1000, BootId("last week")), ENGINE)

    assert members(stat(101, ppid=100), markers={101: ENGINE}, tree=old) == set()
