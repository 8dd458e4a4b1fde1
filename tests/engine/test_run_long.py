"""configs/demo_long.toml on two real instances: one is killed in mid-batch, then the main process itself.

Two runs, and many questions to what they leave behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from streamrl_jax.ranker.knowledge import grouped, read_knowledge
from streamrl_jax.ranker.state import state_directory, state_faults
from streamrl_jax.types import FinishReason, InstanceState, Sample, VersionRun
from tests.engine.run_world import (
    CONFIGS,
    alive,
    blobs,
    called,
    consumed,
    dispatched_ids,
    has_step,
    instance_of,
    instance_status,
    kill_group,
    running,
    steps,
    streamrl,
    trained,
    until,
    warm_start,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

CONFIG = CONFIGS / "demo_long.toml"
VICTIM, SURVIVOR = "instance-1", "instance-0"
SAMPLES = 128
BOUND = 1e-3  # on the log-prob difference of every single token, as in the configuration
START_S, STEP_S = 600.0, 300.0
GONE_WITHIN_S = 60.0
REWARD = f"{Path(__file__).with_name('chance_reward.py')}:drawn"
NO_EVALUATION = ("trainer.test_freq=0", "trainer.val_before_train=false")
IGNORED = re.compile(
    r"^Exception ignored in[^\n]*\n(?:Traceback[^\n]*\n(?:[ \t][^\n]*\n)*)?KeyboardInterrupt[^\n]*$",
    re.MULTILINE,
)
"""What Python prints, and goes on, where Ctrl-C comes in the middle of a destructor (see `streamrl_jax.interrupt`)."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts on, badly: a fraction of the shipped warm start's steps."""
    return warm_start(tmp_path_factory.mktemp("warm"), CONFIG.name, "sft.steps=60", "sft.stop_check_every=60")


def at_work(run_dir: Path, name: str) -> bool:
    """Whether an instance is in the middle of answers."""
    status = instance_status(run_dir, name)
    return status is not None and status.state is InstanceState.GENERATING and status.running > 8


def members(groups: Sequence[int]) -> list[int]:
    """Living processes of process groups."""
    found = []
    for process in alive(list(psutil.process_iter())):
        try:
            if os.getpgid(process.pid) in groups:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


# ------------------------------------------------------------------ ended while it starts


def test_ctrl_c_while_the_engines_load_leaves_nothing(warm: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # Without the cache, so that the signal comes in the middle of a compilation.
    compiling = (f"model.path={warm}", "trainer.compilation_cache=off")
    with running("train", CONFIG, *compiling, "--run-dir", run_dir, log=tmp_path / "log") as command:

        def loading() -> bool:
            return sum("EngineCore" in program for program in called(command.tree())) == 2

        command.until(loading, "both engine cores are there", START_S)
        started = command.tree()
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does
        assert command.wait(STEP_S) == 130
        assert alive(started) == []
    assert "Traceback" not in re.sub(IGNORED, "", command.output())
    assert blobs(run_dir) == []


# ------------------------------------------------------------------ synchronous, an instance is killed


@dataclass(frozen=True)
class Bereft:
    """A run that lost an instance, got it back, and was told to end."""

    run_dir: Path
    lost_in: int  # the iteration
    back_in: int  # the first recorded one to which the restarted instance gave answers
    exit_code: int
    left: list[psutil.Process]
    output: str


@pytest.fixture(scope="module")
def bereft(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Bereft:
    folder = tmp_path_factory.mktemp("sync")
    run_dir = folder / "run"
    # More iterations than there will be, however long the lost instance takes to start.
    arguments = ["train", CONFIG, f"model.path={warm}", *NO_EVALUATION, "trainer.total_training_steps=1000"]
    # The model is right nowhere yet, and without a spread of rewards the policy's gradient waits for the batch.
    # It cannot be learned, and what chance teaches is little: answers stay as long as they are for as long as it takes.
    arguments += [f"reward.function={REWARD}", "actor.optim.lr=3e-6"]
    with running(*arguments, "--run-dir", run_dir, log=folder / "log") as command:
        command.until(lambda: has_step(run_dir, 1), "the first step", START_S)
        command.until(lambda: at_work(run_dir, VICTIM), f"{VICTIM} is at work", STEP_S, every_s=0.02)
        kill_group(instance_of(run_dir, VICTIM)["pid"])
        command.until(lambda: f"{VICTIM} is lost" in command.output(), f"{VICTIM} is missed", STEP_S)

        def bereaved() -> list[int]:
            return [
                i for i, samples in consumed(run_dir).items() if any(s.generation.attempt for s in samples)
            ]

        # By what is recorded: an iteration is handed out before the record of the one before it is written.
        command.until(lambda: bool(bereaved()), f"what {VICTIM} had begun is finished", STEP_S, every_s=1.0)
        lost_in = bereaved()[0]

        def helpers() -> list[int]:
            later = {i: samples for i, samples in consumed(run_dir).items() if i > lost_in}
            return [i for i, samples in later.items() if any(by(VICTIM, sample) for sample in samples)]

        command.until(lambda: bool(helpers()), f"{VICTIM} answers again", START_S, every_s=1.0)
        started = command.tree()
        command.tell(signal.SIGTERM)
        code = command.wait(START_S)
        return Bereft(run_dir, lost_in, helpers()[0], code, alive(started), command.output())


def by(instance: str, sample: Sample) -> bool:
    """Whether it was this instance that finished a sample."""
    return sample.generation.instance == instance


def test_each_sample_reaches_the_trainer_once_though_an_instance_dies(bereft: Bereft) -> None:
    found = consumed(bereft.run_dir)
    assert sorted(found) == list(range(max(trained(bereft.run_dir))))
    for iteration, samples in found.items():
        assert len(samples) == SAMPLES
        assert {sample.sample_id for sample in samples} == dispatched_ids(bereft.run_dir, iteration)


def test_what_the_dead_instance_had_begun_is_finished_by_the_other(bereft: Bereft) -> None:
    again = {
        iteration: [sample for sample in samples if sample.generation.attempt]
        for iteration, samples in consumed(bereft.run_dir).items()
    }
    assert {iteration for iteration, samples in again.items() if samples} == {bereft.lost_in}
    assert all(by(SURVIVOR, sample) for sample in again[bereft.lost_in])
    counters = trained(bereft.run_dir)[bereft.lost_in + 1]
    assert counters["rollouter/redispatched"] == len(again[bereft.lost_in])
    assert counters["rollouter/restarts"] == 1
    assert f"{VICTIM} is lost: " in bereft.output
    assert f"{len(again[bereft.lost_in])} samples of {VICTIM} are handed out again" in bereft.output


def test_the_dead_instance_comes_back_with_the_weights_of_its_time(bereft: Bereft) -> None:
    assert f"{VICTIM} is started again (restart 1)" in bereft.output
    samples = [s for s in consumed(bereft.run_dir)[bereft.back_in] if by(VICTIM, s)]
    assert {run.version for sample in samples for run in sample.generation.versions} == {bereft.back_in}
    last = trained(bereft.run_dir)[max(trained(bereft.run_dir))]
    assert last["rollouter/restarts"] == 1
    print(f"\nlost in iteration {bereft.lost_in}, back in {bereft.back_in}")


def test_every_token_agrees_at_a_temperature_other_than_one(bereft: Bereft) -> None:
    worst = 0.0
    samples = consumed(bereft.run_dir)
    for step, metrics in trained(bereft.run_dir).items():
        tokens = sum(len(sample.generation.token_ids) for sample in samples[step - 1])
        assert metrics["training/rollout_tokens_compared"] == tokens
        worst = max(worst, metrics["training/rollout_logprobs_diff_max"])
    print(f"\nlargest log-prob difference over all steps: {worst:.2e}")
    assert worst < BOUND


def test_synchronous_means_the_trainers_own_version(bereft: Bereft) -> None:
    for iteration, samples in consumed(bereft.run_dir).items():
        for sample in samples:
            answer = sample.generation
            assert answer.versions == (VersionRun(iteration, len(answer.token_ids)),)
            assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert trained(bereft.run_dir)[iteration + 1]["training/staleness/max"] == 0


def test_answers_are_long_and_end_at_different_times(bereft: Bereft) -> None:
    for step, metrics in trained(bereft.run_dir).items():
        print(f"\nstep {step}:", *(metrics[f"response_length/{which}"] for which in ("min", "mean", "max")))
        assert metrics["response_length/mean"] > 100
        assert metrics["response_length/max"] > 2 * metrics["response_length/min"]


def test_gradients_are_computed_while_answers_are_still_written(bereft: Bereft) -> None:
    # The first iteration has no statistics for whitening yet, so its policy gradient waits for the batch.
    shares = {step: m["training/overlapped"] for step, m in trained(bereft.run_dir).items() if step > 1}
    print(f"\nshare of the gradient work before the last sample: {shares}")
    assert sum(share > 0 for share in shares.values()) > len(shares) / 2, "where the trainer is not held up"


def test_sigterm_writes_a_checkpoint_and_leaves_no_process(bereft: Bereft) -> None:
    assert bereft.exit_code == 75
    done = max(trained(bereft.run_dir))
    assert (bereft.run_dir / "checkpoints" / f"step_{done}" / "commit_success.txt").exists()
    assert f"go on with streamrl train --resume {bereft.run_dir}" in bereft.output
    assert bereft.left == []
    assert blobs(bereft.run_dir) == []


# ------------------------------------------------------------------ one step stale, the main process is killed

SAVED = 2  # iterations from checkpoint to checkpoint
AGAIN = 2  # that the second life does
PROMPTS = 8
# The first life's updates wait for what runs. The second's do not, and its few slots make sure that something runs.
CHANGES = ("bridge.in_flight=true", "gen.max_num_seqs=2", "gen.lookahead=1")


@dataclass(frozen=True)
class Forsaken:
    """A run whose main process was killed, and that was resumed."""

    run_dir: Path
    restored: int  # the step whose checkpoint the resume found
    processes: list[str]  # that it had
    gone_after_s: float
    left: list[int]  # of the process groups of its instances
    blobs: list[Path]  # that it left behind
    resumed_output: str

    @property
    def last(self) -> int:
        """The last step of the second life."""
        return self.restored + AGAIN


def saved(run_dir: Path) -> list[int]:
    """Steps whose checkpoints are whole."""
    whole = run_dir.glob("checkpoints/step_*/commit_success.txt")
    return [int(path.parent.name.removeprefix("step_")) for path in whole]


@pytest.fixture(scope="module")
def forsaken(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Forsaken:
    folder = tmp_path_factory.mktemp("async")
    run_dir = folder / "run"
    arguments = [
        *("train", CONFIG, f"model.path={warm}", *NO_EVALUATION, "trainer.max_staleness=1"),
        *("dispatch.policy=skewness", "ranker.refresh_every=3"),
        *(f"data.train_batch_size={PROMPTS}", f"trainer.save_freq={SAVED}"),
        *("trainer.total_training_steps=1000", "--run-dir", run_dir),
    ]
    with running(*arguments, log=folder / "log") as command:
        command.until(lambda: has_step(run_dir, SAVED + 1), "the third step", START_S + 2 * STEP_S)

        processes = command.tree()
        names = called(processes)
        groups = [instance_of(run_dir, name)["pid"] for name in (VICTIM, SURVIVOR)]

        def between_checkpoints() -> bool:
            step = max(saved(run_dir), default=0)
            between = max(trained(run_dir)) == step + 1 and not state_faults(run_dir, step)
            return between and at_work(run_dir, SURVIVOR)

        def held_there() -> bool:
            """It stands still while it is looked at, and goes on unless this is the moment to kill it."""
            if not between_checkpoints():
                return False
            command.tell(signal.SIGSTOP)
            if between_checkpoints():
                return True
            command.tell(signal.SIGCONT)
            return False

        command.until(held_there, f"{SURVIVOR} is at work between two checkpoints", 2 * STEP_S, every_s=0.02)
        command.tell(signal.SIGKILL)
        command.wait(60)
        seconds = until(lambda: not alive(processes), "the end of all processes", 2 * GONE_WITHIN_S)
        left = members(groups)
    behind = blobs(run_dir)
    restored = max(saved(run_dir))
    total = f"trainer.total_training_steps={restored + AGAIN}"
    resume = ("train", "--resume", run_dir, total, *CHANGES)
    output = streamrl(*resume, log=folder / "resumed", within_s=START_S + AGAIN * STEP_S)
    return Forsaken(run_dir, restored, names, seconds, left, behind, output)


def test_killing_the_main_process_leaves_none_of_its_instances(forsaken: Forsaken) -> None:
    print(f"\n{len(forsaken.processes)} processes gone after {forsaken.gone_after_s:.1f} s")
    for kind in ("streamrl_jax.gen.guard", "streamrl_jax.gen.instance", "EngineCore"):
        assert sum(kind in process for process in forsaken.processes) >= 2, forsaken.processes
    assert forsaken.gone_after_s < GONE_WITHIN_S
    assert forsaken.left == []


def test_what_it_left_in_shared_memory_goes_with_its_instances(forsaken: Forsaken) -> None:
    assert forsaken.blobs == [], "a killed trainer cannot tidy up: its guards do"
    assert blobs(forsaken.run_dir) == []


def test_a_resumed_run_has_every_step_once_and_the_same_prompts(forsaken: Forsaken) -> None:
    run_dir = forsaken.run_dir
    assert json.loads((run_dir / "run.json").read_text())["incarnation"] == 1
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, forsaken.last + 1))
    assert [m["training/version"] for m in trained(run_dir).values()] == list(range(1, forsaken.last + 1))
    found = consumed(run_dir)
    assert sorted(found) == list(range(forsaken.last))
    for iteration, samples in found.items():
        assert len(samples) == PROMPTS * 8
        assert {sample.sample_id for sample in samples} == dispatched_ids(run_dir, iteration)
    assert (run_dir / "checkpoints" / f"step_{forsaken.last}" / "commit_success.txt").exists()


def test_what_is_known_of_lengths_is_kept_with_the_checkpoints(forsaken: Forsaken) -> None:
    """The killed life's of the checkpoint that the second one began with, and the second one's own."""
    assert "is made again from" not in forsaken.resumed_output
    for step in (forsaken.restored, forsaken.last):
        assert state_faults(forsaken.run_dir, step) == [], step
    known = read_knowledge(state_directory(forsaken.run_dir, forsaken.last), 2048, "").known
    lengths = {row.prompt_id: sorted(row.lengths) for row in known.recent}
    found = [sample for samples in consumed(forsaken.run_dir).values() for sample in samples]
    assert lengths == {row.prompt_id: sorted(row.lengths) for row in grouped(found)}
    for step, metrics in trained(forsaken.run_dir).items():
        assert 0 <= metrics["ranker/unpredicted"] <= PROMPTS, step


def test_what_was_trained_on_after_the_checkpoint_is_set_aside_and_done_again(forsaken: Forsaken) -> None:
    aside = sorted((forsaken.run_dir / "samples" / "superseded" / "1").glob("*.parquet"))
    assert aside[0].name == f"iteration_{forsaken.restored:06d}.parquet"  # what its checkpoint has not seen
    # The weights are those of the checkpoint, and no older ones are left anywhere.
    again = consumed(forsaken.run_dir)[forsaken.restored]
    assert {run.version for sample in again for run in sample.generation.versions} == {forsaken.restored}


def test_a_token_is_one_version_stale_at_most_and_some_are(forsaken: Forsaken) -> None:
    lags = set()
    for iteration, samples in consumed(forsaken.run_dir).items():
        for answer in (sample.generation for sample in samples):
            lags |= {iteration - run.version for run in answer.versions}
            assert sum(run.length for run in answer.versions) == len(answer.token_ids)
    assert lags == {0, 1}
    staleness = [metrics["training/staleness/max"] for metrics in trained(forsaken.run_dir).values()]
    assert staleness[0] == staleness[forsaken.restored] == 0 and max(staleness) == 1


def test_an_update_waits_for_what_runs_unless_told_otherwise(forsaken: Forsaken) -> None:
    pieces = {
        iteration: {len(sample.generation.versions) for sample in samples}
        for iteration, samples in consumed(forsaken.run_dir).items()
    }
    assert all(pieces[iteration] == {1} for iteration in range(forsaken.restored))
    # In flight, an answer meets an update at most once here, or never: that depends on which side is quicker. That its
    # tokens then keep their versions is shown on one engine, where the moment is ours (test_engine_updates.py).
    assert set().union(*pieces.values()) <= {1, 2}
    assert "resumed with changes" in forsaken.resumed_output


def test_both_sides_agree_on_the_probe_after_each_push(forsaken: Forsaken) -> None:
    for step, metrics in steps(forsaken.run_dir).items():
        assert metrics["training/probe_tokens_compared"] > 0, step
        assert metrics["training/probe_tokens_other_version"] == 0, step
        assert metrics["training/probe_logprobs_diff_max"] < BOUND, step
        # Where all of a step's tokens are stale, the probe is all there is.
        assert metrics.get("training/rollout_logprobs_diff_max", 0.0) < BOUND, step
    worst = max(metrics["training/probe_logprobs_diff_max"] for metrics in steps(forsaken.run_dir).values())
    print(f"\nlargest log-prob difference on the probes: {worst:.2e}")
