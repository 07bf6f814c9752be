"""`make demo`, as a person sees it who pipes it into a file."""

import subprocess
import sys

from chaos.system import ROOT


def test_the_demo_keeps_every_promise_and_measures_each_phase() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaos.demo"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise held" in done.stdout
    for phase in ("detect", "fence", "promote", "verify", "route", "first_token", "total"):
        assert f"failover: {phase}" in done.stdout
    assert "\x1b" not in done.stdout, "colours in a file"
