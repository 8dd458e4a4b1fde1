"""The pure parts of the engine and of an instance's set-up (the engine itself: tests/engine)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import AccessFiles
from streamrl_jax.gen.options import (
    EngineOptions,
    InstanceSpec,
    bind_process,
    check_cores,
    engine_environment,
    engine_seed,
    parse_cores,
    read_spec,
    split_cores,
    write_spec,
)
from streamrl_jax.gen.translate import continuation_seed, sampled_logprobs, token_versions
from streamrl_jax.types import Fence, group_runs


def flat(*positions: dict[int, float]) -> SimpleNamespace:
    """What vLLM's FlatLogprobs holds for these positions."""
    ends = np.cumsum([len(position) for position in positions]).tolist()
    return SimpleNamespace(
        token_ids=[token for position in positions for token in position],
        logprobs=[value for position in positions for value in position.values()],
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
    )


def test_the_sampled_tokens_logprob_is_picked_whatever_the_order() -> None:
    one_each = flat({7: -0.5}, {7: -0.25})
    assert sampled_logprobs([7, 7], one_each).tolist() == [-0.5, -0.25]
    several = flat({3: -0.1, 7: -2.0}, {7: -0.25}, {9: -3.0, 1: -1.0, 3: -2.0})
    assert sampled_logprobs([7, 7, 3], several).tolist() == [-2.0, -0.25, -2.0]
    with pytest.raises(ValueError):
        sampled_logprobs([8, 7, 3], several)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
def test_versions_of_any_stretch_are_those_of_its_tokens(versions: list[int], data: st.DataObject) -> None:
    starts: list[tuple[str, int]] = []
    for index, version in enumerate(versions):
        if not starts or starts[-1][0] != str(version):
            starts.append((str(version), index))
    first = data.draw(st.integers(0, len(versions)))
    count = data.draw(st.integers(0, len(versions) - first))
    assert token_versions(starts, first, count) == group_runs(versions[first : first + count])


def test_a_continuation_has_noise_of_its_own() -> None:
    assert continuation_seed(None, 5) is None
    assert continuation_seed(3, 0) == 3
    derived = {continuation_seed(3, carried) for carried in range(1, 50)}
    assert len(derived) == 49
    assert all(seed is not None and 0 <= seed < 2**63 and seed != 3 for seed in derived)
    assert continuation_seed(3, 7) == continuation_seed(3, 7)


def test_no_two_starts_share_a_seed() -> None:
    seeds = {
        engine_seed(run, f"instance-{index}", incarnation, start)
        for run in range(3)
        for index in range(4)
        for incarnation in range(3)
        for start in range(3)
    }
    assert len(seeds) == 3 * 4 * 3 * 3
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_cores_are_shared_out_among_ranks() -> None:
    assert parse_cores("cpu:0-3,6") == [0, 1, 2, 3, 6]
    assert split_cores("cpu:0-3", 2) == "0,1|2,3"
    assert split_cores("cpu:0,1,2", 2) == "0|1,2"
    with pytest.raises(UserError, match=r"gen\.devices = 'cpu:0'.*tensor_parallel_size = 2"):
        split_cores("cpu:0", 2)
    for bad in ("cpu:", "cpu:a", "cpu:1-", "0,,1"):
        with pytest.raises(UserError, match=r"gen\.devices"):
            parse_cores(bad)
    check_cores("cpu:0,6", {0, 5, 6})
    with pytest.raises(UserError, match=r"'cpu:0-3': there is no core 1, 3 here.*it may use 0, 2"):
        check_cores("cpu:0-3", {0, 2})


def test_the_environment_follows_the_device() -> None:
    one = engine_environment(EngineOptions("m", 8, device="cpu:2,3"))
    assert (one["OMP_NUM_THREADS"], one["OMP_PLACES"]) == ("2", "{2,3}")
    assert one["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    two = engine_environment(EngineOptions("m", 8, device="cpu:2,3", tensor_parallel_size=2))
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"
    assert "OMP_NUM_THREADS" not in two
    gpu = engine_environment(EngineOptions("m", 8, device="4,5"))
    assert gpu["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "TORCHDYNAMO_DISABLE" not in gpu


def test_a_spec_survives_its_file_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    for fence in (None, Fence("run", 2)):
        spec = InstanceSpec(
            "instance-0", EngineOptions("m", 8, seed=3), access=AccessFiles("t", everywhere=True), fence=fence
        )
        write_spec(spec, path)
        assert read_spec(path) == spec
    path.write_text('{"name": "x", "engine": {"model": "m", "max_model_len": 8, "modle": 1}}')
    with pytest.raises(UserError, match=r"spec\.json is no instance spec.*modle"):
        read_spec(path)
    with pytest.raises(UserError, match=r"none\.json"):
        read_spec(tmp_path / "none.json")


def _bound_to(core: int) -> list[set[int]]:
    """In a process of its own: the cores of a thread that was there before, and of a process that is started then."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        bind_process(f"cpu:{core}")
        assert thread.native_id is not None
        command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        child = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        return [os.sched_getaffinity(thread.native_id), {int(one) for one in child.split()}]
    finally:
        ended.set()


def test_a_thread_that_starts_while_the_others_are_bound_is_bound_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one that was not bound yet; where threads never cease to come it ends all the same."""
    bound: list[int] = []
    looks = iter([["1", "2"], ["1", "2", "3"], ["2", "3", "4"], ["2", "3", "4"], ["9"]])
    monkeypatch.setattr("os.listdir", lambda path: next(looks))
    monkeypatch.setattr("os.sched_setaffinity", lambda thread, cores: bound.append(thread))
    bind_process("cpu:0")
    assert sorted(bound) == [1, 2, 3, 4]
    endless = iter(range(10, 10_000))
    monkeypatch.setattr("os.listdir", lambda path: [str(next(endless))])
    bind_process("cpu:0")
    assert len(bound) == 20


def test_a_bound_instance_keeps_all_its_threads_and_processes_to_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(_bound_to, core).result(60) == [{core}, {core}]
