"""Tiers of the tests: which are slow, and of which long parametrised tests a gate takes a sample.

`make test` runs all tests but the slow ones, `make test-all` both, `make test-fast` the unit tests of broker and
providers. With `--sample`, the commit chooses which parameters of the tests in SAMPLED run, and which files of
ROTATED; one commit always runs the same ones. tests/conftest.py applies the tables, and leaves files without a chosen
test out of the collection.
"""

import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import pytest

SLOW = {
    "tests/api/test_fuzz.py": "any input of any client, 135 s",
    "tests/api/test_files.py": "15 s",
    "tests/cli/test_demo.py": "make demo and the first notebook in small, 74 s",
    "tests/clouds/": "SkyPilot's server against emulated clouds, 350 s",
    "tests/conformance/test_provider_clouds.py": "the law of providers on every emulated cloud, 79 s",
    "tests/controllers/test_spot_moves.py": "half a day of a job, four times, 30 s",
    "tests/conformance/test_store_live_postgres.py": "plans over 5,000 attempts, 3 s",
    "tests/crash/": "real daemons and databases that are killed, 480 s",
    "tests/grants/test_run.py": "credentials over many lives, 71 s",
    "tests/reliability/": "a real daemon under one fault of its host, 30 s",
    "tests/security/test_host_isolation.py": "a real daemon and its attackers, 65 s",
    "tests/security/test_fuzz.py": "changed files for every parser, 10 s",
    "tests/sim/": "a sample of what make reliability simulates, 32 s",
    "tests/web/test_browser.py": "a real browser, 15 s",
    "tests/test_soak.py": "the long tests' own driver",
    "tests/store/test_embedded.py": "starts and kills of PostgreSQL, 23 s",
    "tests/unit/broker/estimator/memory/simulator/test_seq2seq.py": "16 s",
    "tests/unit/broker/estimator/memory/test_estimate_properties.py": "28 s",
    "tests/unit/broker/quote/test_spot_wait.py::test_no_market_makes_a_job_late": "jobs on forty markets, 5 s",
    "tests/unit/benchmarks/": "benchmarks against their recorded figures, 20 s",
    "tests/trainer/agent/test_script_machines.py": "programs on two machines, 58 s",
    "tests/trainer/agent/test_short_notice.py": "ends with too little time, 48 s",
    "tests/trainer/agent/test_token_cache.py": "30 s",
    "tests/trainer/agent/test_trackers.py": "real trackers, 37 s",
    "tests/trainer/checkpoint/test_last_save.py": "15 s",
    "tests/trainer/checkpoint/test_pending_checkpoint.py": "full stores, 32 s",
    "tests/trainer/memtrace/": "traces against real allocations, 190 s",
    "tests/trainer/models/test_accelerations.py": "compiled layers and fp8, 51 s",
    "tests/trainer/models/test_methods.py": "every method of training, 47 s",
    "tests/trainer/models/test_untrusted.py": "28 s",
    "tests/trainer/parallel/test_barrier.py": "collectives past their timeout, 202 s",
    "tests/trainer/parallel/test_machines.py": "two agents of one job, 72 s",
    "tests/trainer/models/test_families.py": "24 s",
    "tests/trainer/parallel/test_parallel.py": "98 s",
    "tests/trainer/parallel/test_parallel_tasks.py": "every task divided, 26 s",
    "tests/trainer/standalone/test_output_alone.py": "61 s",
    "tests/trainer/tasks/test_text_to_image.py": "42 s",
    "tests/trainer/training/test_determinism.py": "every task twice, 58 s",
    "tests/trainer/training/test_frameworks.py": "other frameworks' trainers, 85 s",
    "tests/trainer/training/test_full_disk.py": "38 s",
    "tests/trainer/training/test_kill_schedules.py": "runs killed by schedule, 68 s",
    "tests/trainer/training/test_out_of_memory.py": "39 s",
    "tests/trainer/training/test_resume_bitwise.py::test_resume_bitwise[lora]": "94 s, after [full]",
    "tests/cli/test_base_install.py": "installs the client alone, 30 s",
    "tests/cli/test_orphans.py": "with and without a daemon, 20 s",
    "tests/conformance/test_store_twins.py": "both stores compared, 24 s",
    "tests/controllers/test_clock_steps.py": "clocks that step by an hour and a day, 38 s",
    "tests/controllers/test_faults.py": "one dead component at a time, 47 s",
    "tests/controllers/test_rented.py": "clouds whose launcher sets machines up, 66 s",
    "tests/controllers/test_stories.py::test_the_cap_holds_and_a_raised_cap_resumes[postgres]": "in real time, 23 s",
    "tests/security/test_rls.py": "a database without each policy, 34 s",
    "tests/security/test_tenancy.py": "every operation by another team, 88 s",
    "tests/slack/test_daemon.py": "a whole job in one thread, 28 s",
    "tests/store/test_unready.py": "databases that fail, 21 s",
    "tests/unit/broker/model_catalog/test_config_fuzz.py": "13 s",
    "tests/unit/broker/model_catalog/test_kinds.py": "16 s",
    "tests/unit/providers/aws/test_iam.py": "a launch by SkyPilot with few rights, 38 s",
    "tests/unit/providers/common/test_machine_task.py": "the script that a rented machine runs, 97 s",
    "tests/unit/providers/common/test_self_stop.py": "real scripts that end a machine, 59 s",
    "tests/unit/providers/skypilot/test_environment.py": "installs SkyPilot's environment, 24 s",
    "tests/trainer/agent/test_attempts.py": "40 s",
    "tests/trainer/standalone/test_preflight.py": "faults of data sets, with the code that trains, 99 s",
    "tests/trainer/tasks/test_images.py": "44 s",
    "tests/trainer/tasks/test_preferences.py": "40 s",
    "tests/trainer/training/test_before_results.py": "19 s",
    "tests/trainer/training/test_divergence.py": "runs that diverge and go back, 65 s",
    "tests/trainer/training/test_faults.py": "24 s",
    "tests/trainer/training/test_result_writer.py": "42 s",
}
"""Folders (with a slash at the end), files and tests of `make test-slow`, with the seconds they took."""

IN_MEMORY = ("tests/api/", "tests/controllers/")
"""Folders whose tests run over both stores. Over the one in memory, which no user has, they are slow ones."""

SAMPLED = {
    "tests/api/test_fuzz.py::test_every_operation_keeps_its_description": 6,
    "tests/clouds/scenarios/test_rented.py": 3,
    "tests/clouds/scenarios/test_rented.py::test_a_fine_tune_on_each_cloud_costs_the_amount_billed": 2,
    "tests/crash/test_crashes.py::test_a_broker_frozen_past_its_leases_while_another_continues": 2,
    "tests/crash/test_crashes.py::test_a_daemon_killed_at_an_effect_or_commit": 3,
    "tests/crash/test_crashes.py::test_a_daemon_killed_at_any_time": 2,
    "tests/crash/test_lives.py::test_a_daemon_killed_at_actions_of_users_or_the_cloud": 2,
    "tests/trainer/memtrace/test_fake_distributed.py::test_the_trace_equals_the_allocations_of_two_processes": 5,
    "tests/trainer/memtrace/test_lora_targets.py::test_targets_train_what_peft_would": 6,
    "tests/trainer/memtrace/test_memory_form.py::test_the_simulation_equals_the_trace": 16,
    "tests/trainer/memtrace/test_tracer.py::test_the_trace_equals_torchs_allocations": 6,
    "tests/trainer/models/test_families.py::test_a_family_learns_and_is_resumed_bit_by_bit": 4,
    "tests/trainer/parallel/test_barrier.py::test_machines_wait_for_the_one_that_takes_longest": 1,
    "tests/trainer/parallel/test_parallel.py::test_many_processes_equal_one": 4,
    "tests/trainer/parallel/test_parallel_tasks.py::test_sharded_training_equals_unsharded": 5,
    "tests/trainer/training/test_determinism.py::test_packing_is_refused_where_processes_share_model_or_gradients": 2,
    "tests/trainer/training/test_frameworks.py::test_continues_after_a_kill_and_saves_when_asked_to_stop": 1,
    "tests/trainer/training/test_kill_schedules.py::test_a_run_that_is_killed_by_schedule_equals_the_undisturbed_one": 4,  # noqa: E501
    "tests/trainer/training/test_resume_bitwise.py::test_resume_bitwise": 1,
}
"""Number of parameters of each of these tests, or of a file's tests without parameters, that run with `--sample`."""

ROTATED = {"tests/trainer/": 3, "tests/clouds/test_": 2, "tests/api/": 4, "tests/controllers/": 4}
"""Beginnings of paths: with `--sample` a commit runs the slow tests of one file in so many, and all fast tests."""


FIRST = (
    "tests/trainer/training/test_resume_bitwise.py", "tests/trainer/parallel/test_barrier.py",
    "tests/trainer/training/test_frameworks.py", "tests/trainer/training/test_kill_schedules.py",
    "tests/crash/", "tests/clouds/test_sky_", "tests/grants/test_run.py", "tests/security/test_host_isolation.py",
    "tests/reliability/", "tests/cli/test_demo.py", "tests/api/test_fuzz.py", "tests/sim/",
)  # fmt: skip
"""Beginnings of paths whose few tests take longest. They begin first, so that no process runs them alone at the end."""


def turn(test: str) -> int:
    """Return the place of a test's file in FIRST, or the number behind all of them."""
    return next((place for place, beginning in enumerate(FIRST) if test.startswith(beginning)), len(FIRST))


@cache
def commit() -> str:
    """Return the commit that is checked out; empty outside of a clone."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


def is_slow(test: str) -> bool:
    """Return True for a test of SLOW, or over the store in memory. `test`: its id, relative to the repository."""
    path, _, name = test.partition("::")
    in_memory = path.startswith(IN_MEMORY) and ("[memory]" in name or "[memory-" in name)
    return in_memory or any(test.startswith(entry) if entry.endswith("/") else entry in (path, test) for entry in SLOW)


def has_nothing_for(markers: str, path: str) -> bool:
    """Return True if no test of a file is chosen by pytest's `-m`, so that the file need not be imported.

    `path`: the file, relative to the repository. Of other expressions than those of the Makefile nothing is known.
    """
    folders = tuple(entry for entry in SLOW if entry.endswith("/"))
    if markers == "not slow":
        return path.startswith(folders) or path in SLOW
    holders = {entry.partition("::")[0] for entry in SLOW}
    return markers == "slow" and not (path.startswith(folders + IN_MEMORY) or path in holders)


def drawn(ids: Sequence[str], count: int, seed: str) -> set[str]:
    """Return `count` of the ids: those whose hash with the seed is lowest."""
    return set(sorted(ids, key=lambda id: hashlib.sha256(f"{seed} {id}".encode()).digest())[:count])


def left_out(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the items of SAMPLED tests and the slow items of ROTATED files that the seed does not choose."""
    names = [item.nodeid for item in items]
    unchosen = unchosen_parameters(names, seed) | unchosen_files(names, seed)
    return [item for item in items if item.nodeid in unchosen]


def unchosen_parameters(tests: Sequence[str], seed: str) -> set[str]:
    by_test: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        name, parametrised, _ = test.partition("[")
        by_test[name if parametrised else test.partition("::")[0]].append(test)
    return {name for test, count in SAMPLED.items() for name in set(by_test[test]) - drawn(by_test[test], count, seed)}


def unchosen_files(tests: Sequence[str], seed: str) -> set[str]:
    unchosen: set[str] = set()
    for beginning, turns in ROTATED.items():
        slow = [test for test in tests if test.startswith(beginning) and is_slow(test)]
        files = {test.partition("::")[0] for test in slow}
        chosen = drawn(sorted(files), -(-len(files) // turns), seed)
        unchosen |= {test for test in slow if test.partition("::")[0] not in chosen}
    return unchosen
