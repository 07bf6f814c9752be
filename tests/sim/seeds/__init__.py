"""Schedules that once broke an invariant, shrunk and named after what must be true instead."""

from typing import Final

from tests.sim.schedule import Schedule, Step
from tests.sim.shapes import Shape

__all__ = ["SEEDS"]

_PAIR: Final = Shape(has_batch=False)
_FULL: Final = Shape()


def _schedule(seed: int, *steps: Step, shape: Shape = _PAIR, heals: bool = False) -> Schedule:
    return Schedule(seed, shape, steps, heals)


SEEDS: Final[dict[str, Schedule]] = {
    # ------------------------------------------------------------------ adoption
    "a_daemon_adopted_empty_is_told_to_load": _schedule(3, Step(0.0434, "crash"), heals=True),
    "nothing_is_started_or_promoted_before_everything_is_adopted": _schedule(
        23, Step(2.692, "unkillable", "primary", 3.0), Step(2.9212, "crash")
    ),
    "a_death_during_adoption_starts_nothing": _schedule(
        175, Step(5.7562, "unkillable", "a", 1.0), Step(5.9858, "crash"), shape=_FULL, heals=True
    ),
    "a_fork_that_a_dead_supervisor_ordered_is_ended": _schedule(
        176, Step(3.7591, "hang", "primary", 2.0), Step(4.3032, "stop", "zygote-chat", 3.0),
        Step(5.1032, "crash"), heals=True,
    ),
    "an_adopted_daemon_that_is_silent_is_replaced": _schedule(
        1019, Step(4.4881, "unkillable", "cache-chat", -1.0), Step(5.8132, "crash")
    ),
    "no_worker_is_started_before_adoption_has_ended": _schedule(
        5850, Step(2.5218, "crash"), Step(2.5412, "unkillable", "gateway-0", 1.0),
        shape=Shape(workers=2, has_batch=False),
    ),
    "an_engine_that_turned_wrong_does_not_set_the_answer": _schedule(
        339, Step(3.3681, "crash"), Step(3.4963, "wrong", "a", 0.6), shape=_FULL
    ),
    "without_a_journal_the_primary_sets_the_answer": _schedule(
        10844, Step(2.5121, "wrong", "standby", 0.2), Step(2.5357, "damage", verb="gone"),
        heals=True,
    ),
    "an_order_that_a_dead_supervisor_left_unread_is_known_after_adoption": _schedule(
        20085, Step(0.126, "stop_on", "a", 0.5, "assume", "before"), Step(2.169, "crash"),
        Step(3.053, "kill", "a"), heals=True,
    ),
    # ----------------------------------------------------------- order and epochs
    "a_standby_with_a_bad_health_page_replaces_a_hung_primary_all_the_same": _schedule(
        8001370, Step(5.1886, "kill", "a"), Step(10.526, "unhealthy", "primary", 0.2),
        Step(10.5283, "promote", "a"), Step(13.354, "hang", "primary", 2.0),
    ),
    "a_batch_engine_is_cut_off_before_it_is_killed": _schedule(
        10, Step(2.8044, "restart", "batch"), shape=_FULL
    ),
    "an_epoch_is_never_given_out_twice": _schedule(
        421, Step(9.3727, "slow", "b", 1.0), Step(9.7154, "promote", "b")
    ),
    "an_epoch_is_on_disk_before_a_new_supervisor_gives_it_out": _schedule(
        63536, Step(2.5575, "crash_on", "", 0.5, "assume", "before"), Step(2.6427, "crash"),
        Step(2.6658, "kill", "gateway-0"), Step(2.8863, "kill", "primary"),
        Step(3.1119, "kill", "b"),
    ),
    "a_recovery_is_decided_anew_behind_an_operation": _schedule(
        1383, Step(2.5175, "stall", "", 0.05), Step(2.521, "kill", "primary"),
        Step(2.5358, "promote", "b"), heals=True,
    ),
    "two_who_ask_for_a_fence_share_one": _schedule(
        2881, Step(6.6141, "stall", "", 5.0), Step(6.9535, "kill", "b"),
        Step(9.2391, "restart", "b"),
    ),
    "the_newest_route_is_always_published": _schedule(
        305, Step(3.3235, "restart", "batch"), Step(3.4742, "crash"),
        shape=Shape(standbys=2, has_ladder=True), heals=True,
    ),
    # --------------------------------------------------------------------- pause
    "pause_waits_for_the_switchover_under_way": _schedule(
        31, Step(2.5116, "promote", "b"), Step(2.5116, "pause"), heals=True
    ),
    "an_epoch_in_a_table_that_a_worker_has_not_read_is_known_after_adoption": _schedule(
        3000959, Step(3.7244, "kill", "gateway-0"),
        Step(3.9908, "stop_on", "", 0.5, "hello", "after"),
        Step(5.8922, "kill", "a"), Step(6.1838, "crash"), Step(6.301, "damage", verb="corrupt"),
        Step(6.3292, "kill", "b"),
    ),
    "pause_waits_until_what_was_found_is_adopted": _schedule(
        42030, Step(2.6005, "freeze", "batch"), Step(3.971, "unkillable", "b", -1.0),
        Step(4.7504, "crash"), Step(5.2499, "pause"), shape=_FULL, heals=True,
    ),
    "nobody_is_frozen_by_an_adoption_while_paused": _schedule(
        1000343, Step(4.0408, "freeze", "batch"), Step(5.154, "unkillable", "batch", 3.0),
        Step(9.9638, "pause"), Step(10.3517, "crash"), shape=_FULL,
    ),
    "a_start_that_fails_while_paused_ends_nothing": _schedule(
        3377, Step(0.0268, "pause"), Step(0.0534, "kill_on", "", 0.5, "attach", "before")
    ),
    "a_table_that_a_dead_supervisor_left_unread_is_ignored": _schedule(
        112310, Step(3.3173, "starve", "gateway-0", 2.0), Step(4.0855, "kill", "primary"),
        Step(4.6413, "crash"), heals=True,
    ),
    "a_table_left_unread_by_the_second_of_three_supervisors_is_ignored_too": _schedule(
        65066, Step(7.5714, "crash"), Step(9.6027, "stop_on", "", 0.5, "hello", "after"),
        Step(10.1512, "kill", "gateway-0"), Step(11.3085, "crash"),
    ),
    "an_engine_whose_control_socket_is_stuck_is_replaced": _schedule(
        100329, Step(2.6734, "kill", "primary"), Step(2.9301, "wrong", "primary", 2.0),
        Step(3.0515, "lose_on", "b", 0.5, "canary", "before"),
        shape=Shape(workers=2, has_batch=False, has_load=False),
    ),
    # ---------------------------------------------------------------- unkillable
    "an_unkillable_engine_that_dies_after_all_is_replaced": _schedule(
        122, Step(2.606, "unkillable", "primary", 3.0), Step(3.2265, "restart", "b"), heals=True
    ),
    "an_eviction_that_is_not_proven_leaves_nothing_fencing": _schedule(
        137, Step(2.5068, "unkillable", "batch", -1.0), Step(2.5202, "hold", "batch"), shape=_FULL
    ),
    "a_stop_does_not_wait_for_an_engine_that_cannot_be_killed": _schedule(
        18, Step(8.017, "unkillable", "primary", -1.0)
    ),
    "an_engine_unkillable_at_its_start_is_not_fenced_for_ever": _schedule(
        68, Step(0.6752, "unkillable", "c", -1.0),
        shape=Shape(workers=2, standbys=2, has_batch=False, has_cache=False), heals=True,
    ),
    "a_new_daemon_is_not_taken_for_the_one_that_cannot_be_killed": _schedule(
        526, Step(2.5147, "unkillable", "cache-chat", -1.0), heals=True
    ),
    "a_daemon_that_cannot_be_killed_at_the_first_start_is_replaced": _schedule(
        1271, Step(0.0169, "unkillable", "cache-chat", -1.0)
    ),
    # ------------------------------------------------------------------- helpers
    "a_zygote_that_never_answers_is_replaced": _schedule(
        174, Step(2.5134, "stop", "primary", 1.0),
        Step(2.5172, "lose_on", "", 0.5, "fork", "before"), Step(2.5274, "kill", "b"),
        shape=Shape(standbys=2, has_batch=False), heals=True,
    ),
    "a_zygote_that_waits_for_a_cpu_when_it_is_to_be_adopted_is_joined_later": _schedule(
        64930, Step(0.0104, "starve", "zygote-chat", 0.6), Step(0.0452, "crash")
    ),
    "a_stopped_cache_daemon_is_replaced": _schedule(
        114, Step(0.3952, "stop_on", "", 0.5, "attach", "after"), shape=_FULL
    ),
    "a_daemon_that_falls_silent_while_it_loads_is_replaced": _schedule(
        130566, Step(0.4216, "unkillable", "cache-chat", -1.0), heals=True
    ),
    "a_supervisor_whose_start_waits_for_the_operators_word_stays": _schedule(
        130410, Step(0.5661, "unkillable", "cache-chat", 3.0),
        Step(0.9444, "unkillable", "a", -1.0), heals=True,
    ),
    "a_push_by_a_fence_counts_as_published": _schedule(
        121863, Step(2.5204, "unkillable", "b", -1.0), Step(2.5405, "promote", "b"),
        Step(2.5461, "restart", "a"),
    ),
    "watching_goes_on_when_the_daemon_dies": _schedule(
        74, Step(4.2667, "unkillable", "cache-chat", 1.0)
    ),
    "helpers_are_not_blamed_for_a_stall_of_ours": _schedule(
        140, Step(2.5028, "stall", "", 5.0), Step(2.5155, "kill", "batch"), shape=_FULL, heals=True
    ),
    "two_who_hold_the_memory_leak_nothing": _schedule(269, heals=True),
    # ------------------------------------------------------------------ commands
    "a_restart_during_an_eviction_brings_the_engine_back": _schedule(
        241, Step(2.6384, "hold", "batch"), Step(2.6689, "restart", "batch"), shape=_FULL
    ),
    "a_stray_that_a_pause_spares_cannot_be_attested": _schedule(
        10068906, Step(4.4391, "no_descriptors", "", 0.3), Step(4.4633, "restart", "c"),
        Step(4.4648, "pause"), Step(5.5745, "attest", "c"),
        shape=Shape(standbys=2, has_batch=False, has_ladder=True, has_load=True), heals=True,
    ),
    "a_stop_ends_a_fork_that_is_under_way": _schedule(
        728, Step(0.0464, "failing_loads", "", 5), shape=Shape(standbys=2, has_batch=False)
    ),
    "an_engine_whose_connection_breaks_while_it_starts_is_heard_all_the_same": _schedule(
        960000250, Step(0.2905, "stop", "cache-chat", 3.0), Step(3.6563, "sever", "a", 0.3),
        heals=False,
    ),
    "a_primary_whose_connection_breaks_while_it_is_adopted_is_kept": _schedule(
        960000514, Step(8.0069, "unkillable", "b", 3.0), Step(10.4395, "damage", verb="corrupt"),
        Step(11.2728, "sever", "a", 1.0), heals=True,
    ),
    "a_daemon_whose_connection_breaks_while_it_is_brought_up_is_gone_on_with": _schedule(
        60007733, Step(2.6947, "crash"), Step(2.7083, "wrong", "standby", 2.0),
        Step(6.5336, "segv", "cache-chat", 1.0), Step(6.9265, "sever", "cache-chat", 1.0),
        shape=Shape(has_batch=False),
    ),
    "a_standby_that_died_before_its_promotion_is_left_to_its_next_start": _schedule(
        50018689, Step(2.5113, "kill", "primary", 0.3), Step(2.5122, "segv", "b", 1.0),
        shape=Shape(has_batch=False, has_cache=True, has_load=True),
    ),
    "a_hung_standby_that_is_replaced_is_not_reached_for_in_its_next_life": _schedule(
        50011450, Step(2.6115, "stop", "standby", 1.0), Step(2.994, "kill", "primary", 3.0),
        shape=Shape(workers=2, has_batch=False, has_load=True, has_neighbour=True), heals=True,
    ),
    "an_order_whose_answer_is_lost_with_the_connection_is_repeated": _schedule(
        40000102, Step(2.5119, "kill", "primary", 0.3), Step(2.5153, "sever", "b", 3.0),
        shape=Shape(workers=2, standbys=2, has_batch=False, has_cache=True),
    ),
    "a_role_and_a_canary_outlive_the_connection_that_they_were_asked_over": _schedule(
        30005626, Step(0.8408, "sever", "batch", 3.0), shape=_FULL, heals=True
    ),
    "an_engine_whose_connection_breaks_under_its_canary_is_asked_once_more": _schedule(
        970000366, Step(3.8261, "slow", "zygote-chat", 0.3), Step(4.7947, "crash"),
        Step(5.411, "sever", "batch", 0.3), shape=_FULL,
    ),
    "a_standby_that_cannot_be_reached_for_want_of_a_descriptor_is_promoted_later": _schedule(
        950000696, Step(2.5028, "sever", "standby", 0.3), Step(2.5219, "no_descriptors", "", 0.3),
        Step(2.5224, "kill", "primary", 0.3), heals=True,
    ),
    "a_worker_whose_start_the_stop_has_overtaken_is_not_started": _schedule(
        910001424, Step(6.6452, "stall", "", 5.0), Step(7.2937, "end"),
        Step(11.1744, "doom", "gateway-0", 4), heals=True,
    ),
    "an_eviction_finishes_the_fence_that_a_stop_has_ended_half_way": _schedule(
        159580980456, Step(2.5054, "unkillable", "gateway-0", -1.0),
        Step(2.5067, "doom", "batch", 3), Step(2.5298, "stall", "", 1.0), Step(2.5405, "end"),
        Step(2.5476, "evict", "batch"), heals=True,
        shape=Shape(workers=1, standbys=1, has_batch=True, has_ladder=False, has_cache=True,
                    has_load=True, has_neighbour=False),
    ),
}  # fmt: skip
