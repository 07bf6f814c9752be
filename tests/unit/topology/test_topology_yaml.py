"""Files that are not the YAML we need."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisor.topology import Finding, check
from supervisor.topology.document import MAX_FILE_BYTES
from tests.unit.topology.site import CORRECT, FakeMachine, Site


def found(site: Site, text: str | bytes) -> list[Finding]:
    return check(site.write(text), {}, machine=FakeMachine())


@pytest.mark.parametrize(
    ("text", "line", "what", "instead"),
    [
        ("", 1, "is empty", "write at least version, name, state_dir and groups"),
        ("# only a comment\n", 1, "is empty", "write at least"),
        ("- a\n- b\n", 1, "is a list, not a mapping of keys", "write at least"),
        ("\nhello\n", 2, "is a single value, not a mapping of keys", "write at least"),
        ("version: 1\nname: [a\n", 3, "is not YAML: while parsing a flow sequence", "write `key:"),
        ("version: 1\n\tname: x\n", 2, "is not YAML: while scanning for the next token", "spaces"),
        (
            "version: 1\n---\nname: x\n",
            2,
            "is not YAML: expected a single document",
            "one document",
        ),
        ("name: *nowhere\n", 1, "is not YAML: found undefined alias", "write the anchor"),
        ("version: 1\nname: a\0b\n", 2, "character U+0000 is not allowed in YAML", "printable"),
        (b"version: 1\nname: \xff\n", 2, "byte 0xff is not UTF-8", "write the file in UTF-8"),
        ("name: !!python/object:os.system x\n", 1, "carries the tag", "write the plain value"),
        ("? [a, b]\n: 1\n", 1, "a list or mapping stands where a key should", "write `key: value`"),
        ("name: &a [*a]\n", 1, "contains itself", "write the value out"),
        ("<<: 3\n", 1, "'<<' merges something that is not a mapping", "write an alias"),
    ],
)
def test_a_file_that_is_not_a_topology_is_told_with_its_line(
    site: Site, text: str | bytes, line: int, what: str, instead: str
) -> None:
    findings = [f for f in found(site, text) if what in f.what]
    assert [f.line for f in findings] == [line]
    assert instead in findings[0].instead


def test_a_key_given_twice_is_an_error_on_the_second(site: Site) -> None:
    findings = site.check({"gateway:": "admin: {listen: 127.0.0.1:1}\ngateway:"})
    assert [(f.line, f.path, f.what) for f in findings] == [
        (5, "admin", "key 'admin' occurs twice, first on line 4")
    ]


def test_a_missing_file_is_a_finding(site: Site) -> None:
    (finding,) = check(site.folder / "none.yaml", {}, machine=FakeMachine())
    assert str(finding) == (
        f"{site.folder}/none.yaml: cannot be read: No such file or directory; name a topology file"
    )


def test_a_folder_is_a_finding(site: Site) -> None:
    (finding,) = check(site.folder, {}, machine=FakeMachine())
    assert finding.what == "cannot be read: Is a directory"


def test_a_huge_file_is_refused_before_it_is_parsed(site: Site) -> None:
    (finding,) = found(site, b"#" * (MAX_FILE_BYTES + 1))
    assert finding.what == "is longer than 256 KiB"


def test_a_key_with_a_line_break_stays_on_one_line(site: Site) -> None:
    findings = found(site, '"a\\nb": 1\n"\\e[31m": 2\n')
    assert [f.path for f in findings if f.what == "unknown key"] == ["'a\\nb'", "'\\x1b[31m'"]


def test_deep_nesting_is_a_finding(site: Site) -> None:
    assert "nested" in found(site, "a: " + "[" * 5000)[0].what
    assert "nested" in found(site, "a: " + "[" * 60 + "]" * 60)[0].what


def test_aliases_that_multiply_are_cut_off(site: Site) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "expands to over" in found(site, "\n".join(lines))[0].what


def test_aliases_and_merge_keys_work_and_point_at_their_source(site: Site) -> None:
    changes = {
        "{slots: 4, max_length: 256}": "&kv {slots: 4, max_length: 256}",
        "kv: {slots: 2}": "kv: {<<: *kv, slots: 2}",
    }
    engine = site.load(changes).groups[0].engines[2]
    assert (engine.kv.slots, engine.kv.max_length) == (2, 256)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5000).map(str),
    st.sampled_from(["cpu", "cuda:0", "primary", "batch", "1s", "9" * 400 + "s", "1GiB", "a b"]),
    st.sampled_from([".inf", ".nan", "~", "''", '"\\ud800"', '"\\0"', "0.0.0.0:1", "[::1]:8000"]),
    st.text(max_size=12),
)
words = "version name state_dir admin gateway groups model path kv engines role listen devices x"
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(map(str, items))}]"),
        st.dictionaries(st.sampled_from(words.split()), inner, max_size=4).map(
            lambda items: "{" + ", ".join(f"{k}: {v}" for k, v in items.items()) + "}"
        ),
    ),
    max_leaves=12,
)
SLOW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SLOW
@given(data=st.binary(max_size=200))
def test_check_never_raises_on_any_bytes(site: Site, data: bytes) -> None:
    assert all(finding.what for finding in found(site, data))


@SLOW
@given(entries=st.dictionaries(st.sampled_from(words.split()), trees, max_size=8))
def test_check_never_raises_on_any_tree(site: Site, entries: dict[str, object]) -> None:
    text = "\n".join(f"{key}: {value}" for key, value in entries.items())
    assert found(site, text.encode("utf-8", "surrogatepass"))


@SLOW
@given(data=st.data())
def test_check_never_raises_when_a_correct_file_is_damaged(site: Site, data: st.DataObject) -> None:
    text = CORRECT.format(state_dir=site.state_dir, model=site.model)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    damage = data.draw(st.one_of(scalars.map(str), trees.map(str)))
    damaged = text[:start] + damage + text[end:]
    for finding in found(site, damaged.encode("utf-8", "surrogatepass")):
        assert 0 <= finding.line <= damaged.count("\n") + 2
        assert "\n" not in str(finding)
