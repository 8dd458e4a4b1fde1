"""Dynamic sampling in the main job, two steps stale, ended in the middle of an iteration's replacements and resumed."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl_jax.cli import main
from streamrl_jax.config_io import load_config
from streamrl_jax.data import PromptSet, load_prompts
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.samples_log import read_samples
from streamrl_jax.train.replay import replay
from streamrl_jax.types import Sample, expand_runs

from .job_world import (
    ANSWERS,
    PROMPTS,
    jax_settings_kept,
    left_behind,
    training_lines,
    write_config,
    write_world,
)

STEPS, BATCHES = 4, 5

_REWARD = """
import os, sys
main_job = os.getppid() if sys.argv[0].endswith("control/process.py") else os.getpid()
sent = []


def digits_of_some(prompt, text, generation, at="never", number=0):
    if generation.sample_id.startswith(at) and not sent:
        sent.append(number)
        os.kill(main_job, number)
    teaches = int(prompt.token_ids.sum()) % 2
    return sum(character.isdigit() for character in text) / 8 if teaches else 0.0
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with jax_settings_kept():
        world = write_world(tmp_path_factory.mktemp("world"))
        (world / "some.py").write_text(_REWARD)
        signalled = {"at": "train/2+", "number": int(signal.SIGUSR1)}
        config = write_config(
            world,
            run={"name": "dapo"},
            gen={"instances": 2},
            reward={"function": f"{world / 'some.py'}:digits_of_some", "kwargs": signalled},
            actor={"clip_ratio_high": 0.28},
            algorithm={
                "adv_estimator": "grpo",
                "use_kl_in_reward": False,
                "filter_groups": {"enable": True, "max_num_gen_batches": BATCHES},
            },
            trainer={"max_staleness": 2, "total_training_steps": STEPS, "save_freq": 0, "test_freq": 0},
        )
        path = world / "runs" / "dapo"
        assert main(["train", str(config)]) == 75
        assert [line.step for line in training_lines(path)] == [1, 2]
        assert main(["train", "--resume", str(path), 'reward.kwargs={at = "never"}']) == 0
        assert left_behind(path) == []
        yield path


def groups(samples: list[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.sample_id.rpartition("/")[0]].append(sample)
    return found


def expected(prompts: PromptSet, iteration: int, level: set[str]) -> set[str]:
    """By hand: further prompts one by one, until enough groups are not level or the bound is reached."""
    asked = {f"train/{iteration}/{prompt.prompt_id}" for prompt in prompts.iteration(iteration)}
    for number, prompt in enumerate(prompts.further(iteration)):
        if len(asked - level) == PROMPTS or len(asked) == BATCHES * PROMPTS:
            break
        asked.add(f"train/{iteration}+{number}/{prompt.prompt_id}")
    return asked


def test_each_iteration_holds_its_own_prompts_and_the_replacements_of_level_groups(run: Path) -> None:
    cfg = load_config([run / "config.toml"], [])
    prompts = load_prompts(cfg.data, Tokenizer.load(Path(cfg.model.path)), "train", seed=cfg.run.seed)
    lines = training_lines(run)
    assert [line.step for line in lines] == [1, 2, 3, 4]
    replaced = []
    for iteration, line in enumerate(lines):
        samples = read_samples(run, iteration)
        found = groups(samples)
        assert all(sorted(s.group_index for s in group) == list(range(ANSWERS)) for group in found.values())
        level = {name for name, group in found.items() if len({s.reward for s in group}) == 1}
        assert set(found) == expected(prompts, iteration, level)
        assert len({group[0].prompt.prompt_id for group in found.values()}) == len(found), "no prompt twice"
        assert line.number("training/samples") == len(samples) == len(found) * ANSWERS
        assert line.number("training/replaced_prompts") == len(found) - PROMPTS
        replaced.append(len(found) - PROMPTS)
    assert replaced[2] and max(replaced) > 1


def test_replacements_are_no_staler_than_the_rest(run: Path) -> None:
    for iteration, line in enumerate(training_lines(run)):
        lags = [iteration - expand_runs(s.generation.versions) for s in read_samples(run, iteration)]
        assert min(lag.min() for lag in lags) >= 0
        assert line.number("training/staleness/max") == max(lag.max() for lag in lags) <= 2
        difference = line.number("training/probe_logprobs_diff_max")
        assert difference is not None and difference < 1e-5
        assert line.number("rollouter/duplicates_dropped") == line.number("rollouter/redispatched") == 0


def test_the_recorded_samples_give_the_same_losses_again(run: Path) -> None:
    """Those of the groups that were left out are recorded too, and left out again."""
    cfg = load_config([run / "config.toml"], [])
    wanted = [line.number("actor/pg_loss") for line in training_lines(run)]
    found = [result.metrics["actor/pg_loss"] for _, result in replay(cfg, run, range(STEPS))]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)
