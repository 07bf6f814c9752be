"""The token: new at every start, unless the disk takes nothing."""

from pathlib import Path

import pytest

from supervisor.admin import auth
from supervisor.admin.auth import TOKEN_FILE, make_token
from supervisor.errors import StartFailedError


def fail(_path: Path, _data: bytes, **_: bool) -> None:
    raise OSError(28, "No space left on device")


def test_each_start_has_a_new_one(tmp_path: Path) -> None:
    first, second = make_token(tmp_path), make_token(tmp_path)
    assert first != second
    assert (tmp_path / TOKEN_FILE).read_text().strip() == second
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600


def test_a_disk_that_does_not_sync_holds_up_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(_fd: int) -> None:
        pytest.fail("the next start makes another token: it need not survive the machine")

    monkeypatch.setattr("os.fsync", hang)
    monkeypatch.setattr("os.fdatasync", hang)
    make_token(tmp_path)


def test_on_a_full_disk_the_last_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = make_token(tmp_path)
    monkeypatch.setattr(auth, "replace_file", fail)
    assert make_token(tmp_path) == last


@pytest.mark.parametrize("damage", ["absent", "short", "shared", "link"])
def test_one_that_others_may_know_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    make_token(tmp_path)
    path = tmp_path / TOKEN_FILE
    match damage:
        case "absent":
            path.unlink()
        case "short":
            path.write_text("abc")
        case "shared":
            path.chmod(0o644)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to("elsewhere")
    monkeypatch.setattr(auth, "replace_file", fail)
    with pytest.raises(StartFailedError, match="cannot be written"):
        make_token(tmp_path)
