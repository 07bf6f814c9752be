"""Verdicts: silence alone never condemns an engine."""

from itertools import count

from supervisor.core.verdict import ProgressJudge, Sample, Verdict

MS = 1_000_000


def judge() -> ProgressJudge:
    return ProgressJudge(hang_after_s=0.4, interval_s=0.1)


def feed(judge: ProgressJudge, samples: list[Sample]) -> Verdict:
    verdict = Verdict.HEALTHY
    for sample in samples:
        verdict = judge.observe(sample)
    return verdict


def silence(
    ticks: int, *, work: bool = True, stopped: bool = False, runnable: bool = False,
    run_delay_ms: int = 0, on_cpu_ms: int = 0, every_ms: int = 100,
) -> list[Sample]:  # fmt: skip
    return [
        Sample(
            at_ns=i * every_ms * MS,
            steps=7,
            has_work=work,
            is_stopped=stopped,
            on_cpu_ns=i * on_cpu_ms * MS,
            run_delay_ns=i * run_delay_ms * MS,
            is_runnable=runnable,
        )
        for i in range(ticks)
    ]


def test_work_without_steps_is_hung_after_hang_after_and_not_before() -> None:
    assert feed(judge(), silence(4)) is Verdict.BUSY
    assert feed(judge(), silence(5)) is Verdict.HUNG


def test_an_idle_engine_is_healthy_for_ever() -> None:
    assert feed(judge(), silence(100, work=False)) is Verdict.HEALTHY


def test_a_stopped_engine_is_hung_even_without_work() -> None:
    assert feed(judge(), silence(5, work=False, stopped=True)) is Verdict.HUNG


def test_a_saturated_engine_is_busy() -> None:
    steps = count()
    samples = [
        Sample(i * 100 * MS, next(steps), True, False, i * 99 * MS, 0, True) for i in range(50)
    ]
    assert feed(judge(), samples) is Verdict.BUSY


def test_an_engine_that_waits_for_a_cpu_is_busy() -> None:
    assert feed(judge(), silence(20, run_delay_ms=95)) is Verdict.BUSY


def test_an_engine_that_has_not_got_its_cpu_at_all_is_busy() -> None:
    assert feed(judge(), silence(20, runnable=True, on_cpu_ms=5)) is Verdict.BUSY


def test_an_engine_that_spins_without_a_step_is_hung() -> None:
    assert feed(judge(), silence(20, runnable=True, on_cpu_ms=98)) is Verdict.HUNG


def test_late_samples_void_the_judgement() -> None:
    assert feed(judge(), silence(20, every_ms=300)) is not Verdict.HUNG


def test_void_starts_over() -> None:
    subject = judge()
    samples = silence(9)
    feed(subject, samples[:4])
    subject.void()
    assert feed(subject, samples[4:8]) is Verdict.BUSY
    assert subject.observe(samples[8]) is Verdict.HUNG
