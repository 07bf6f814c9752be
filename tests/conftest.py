"""Settings for every test: one thread per maths library, and clear skips for what needs a GPU.

Set before anything imports torch: a fork of a process whose maths library has run threads hangs,
and two intra-op threads change the last bit of a logit.
"""

import os
import shutil
import signal

import pytest

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts us in the background lets us ignore SIGINT, and our children would inherit
# that: tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and skip GPU tests where no NVIDIA driver answers."""
    has_gpu = shutil.which("nvidia-smi") is not None
    no_gpu = pytest.mark.skip(reason="no NVIDIA driver on this machine (nvidia-smi not found)")
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.integration)
        if item.get_closest_marker("gpu") is not None and not has_gpu:
            item.add_marker(no_gpu)
