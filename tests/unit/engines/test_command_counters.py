"""The progress that a `/metrics` page tells, in the words of different engines."""

import pytest

from engines.command.counters import EngineCounters, read_counters

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="a } b"} 100.0
vllm:generation_tokens_total{engine="0",model_name="a } b"} 41.0
vllm:generation_tokens_total{engine="1",model_name="a } b"} 1.0 1700000000
process_cpu_seconds_total 12.5
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 1.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:num_used_tokens{model_name="m"} 512.0
sglang:prompt_tokens_total{model_name="m"} 8.0
"""
LLAMACPP = """\
llamacpp:prompt_tokens_total 30
llamacpp:tokens_predicted_total 4
llamacpp:n_decode_total 3
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
"""
NATIVE = """\
understudy_native_tokens_total{group="chat"} 9.0
understudy_native_prefill_chunks_total{group="chat"} 2.0
understudy_native_active{group="chat"} 1.0
understudy_native_queued{group="chat"} 4.0
"""


@pytest.mark.parametrize(
    ("page", "work", "requests", "waiting"),
    [(VLLM, 142, 5, 3), (SGLANG, 520, 1, 0), (LLAMACPP, 37, 3, 2), (NATIVE, 11, 5, 4)],
    ids=["vllm", "sglang", "llamacpp", "native"],
)
def test_each_dialect_is_understood(page: str, work: int, requests: int, waiting: int) -> None:
    assert read_counters(page) == EngineCounters(work, requests, waiting)


@pytest.mark.parametrize(
    "page",
    ["", "# nothing\n", "go_goroutines 7\n", "vllm:generation_tokens_total NaN\n", "a{b\nc d e\n{"],
)
def test_a_page_without_progress_says_nothing(page: str) -> None:
    assert read_counters(page) is None


@pytest.mark.parametrize(
    ("running", "waiting", "requests"),
    [("1e300", "0", 10**9), ("1e308", "1e308", 2 * 10**9), ("2", "-3", 2), ("-7", "-1", 0)],
)
def test_numbers_that_cannot_be_fit_the_page_all_the_same(
    running: str, waiting: str, requests: int
) -> None:
    page = (
        f"vllm:prompt_tokens_total 1\nvllm:num_requests_running {running}\n"
        f'vllm:num_requests_running{{a="2"}} {running}\nvllm:num_requests_waiting {waiting}\n'
    )
    counters = read_counters(page.replace('{a="2"} 2', '{a="2"} 0'))
    assert counters is not None
    assert counters.requests == requests
    assert 0 <= counters.waiting <= counters.requests
