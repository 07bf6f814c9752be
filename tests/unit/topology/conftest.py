from pathlib import Path

import pytest

from tests.unit.topology.site import Site, build_site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return build_site(tmp_path)
