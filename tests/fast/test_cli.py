"""The command line: what it parses, what it wires, what it tells a user who is wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_jax import rundir
from streamrl_jax.cli import COMMANDS, _parse, main, split_overrides
from streamrl_jax.commands.batch_arithmetic import batch_arithmetic
from streamrl_jax.commands.dryrun import dry_run
from streamrl_jax.commands.starts import Fork, Start, plan_start
from streamrl_jax.config_io import COMMAND_LINE, Layer, config_from_layers, dump_config, load_config
from streamrl_jax.config_schema import keys
from streamrl_jax.errors import UserError
from streamrl_jax.gen.access import AccessFiles
from streamrl_jax.gen.options import InstanceSpec, engine_environment, read_spec
from streamrl_jax.interrupt import StopRequested
from streamrl_jax.setup.devices import DeviceSplit, Machine
from streamrl_jax.setup.instances import engine_options, pool_templates, standalone_spec
from streamrl_jax.train.shapes import plan_rl_shape
from streamrl_jax.types import Fence

from .tiny import hf_config

REPOSITORY = Path(__file__).parents[2]
EIGHT_GPUS = Machine(tuple("01234567"), tuple(range(32)))
TWO_CORES = Machine((), (0, 1))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, a configuration and nothing else; commands run in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf_config()))
    (tmp_path / "base.toml").write_text(
        '[run]\nname = "demo"\n[model]\npath = "model"\n[data]\ntrain = "task:arithmetic"\n'
        "max_prompt_length = 16\nmax_response_length = 16\n[gen]\ninstances = 2\n"
    )
    return tmp_path


def a_run(project: Path, *overrides: str) -> Path:
    """A run directory as a run would have left it."""
    start = plan_start([Path("base.toml")], overrides)
    with rundir.create(start.run_dir, dump_config(start.config)) as run:
        run.metrics.write_text("{}\n")
    return start.run_dir


class Recorder:
    """Stands in for the main job and keeps what it was called with."""

    def __init__(self, outcome: object = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self._outcome = outcome

    def train(self, config: Any, run_dir: Path, **options: Any) -> object:
        self.calls.append({"config": config, "run_dir": run_dir, **options})
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome or SimpleNamespace(stopped_by="", version=3, run_dir=run_dir)


def install(monkeypatch: pytest.MonkeyPatch, outcome: object = None) -> Recorder:
    recorder = Recorder(outcome)
    monkeypatch.setitem(sys.modules, "streamrl_jax.main_job", recorder)
    return recorder


# --- parsing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "others", "overrides"),
    [
        (
            ["a.toml", "--actor.optim.lr", "1e-5", "--dry-run"],
            ["a.toml", "--dry-run"],
            ["actor.optim.lr=1e-5"],
        ),
        (["--trainer.mesh.fsdp", "-1"], [], ["trainer.mesh.fsdp=-1"]),
        (["--run.name=a=b", "--out", "x.y"], ["--out", "x.y"], ["run.name=a=b"]),
        (["--data.system_prompt", "--be brief"], [], ["data.system_prompt=--be brief"]),
        (["--resume", "runs/a.b", "--run-dir=x.y"], ["--resume", "runs/a.b", "--run-dir=x.y"], []),
        (["--resume", "a.toml", "--run-dir", "x"], ["--resume=", "a.toml", "--run-dir", "x"], []),
        (["--resume", "--run.seed", "2", "run.seed=3"], ["--resume=", "run.seed=3"], ["run.seed=2"]),
        (["a.toml", "--resume"], ["a.toml", "--resume"], []),
    ],
)
def test_overrides_are_taken_out_of_the_arguments(
    arguments: list[str], others: list[str], overrides: list[str]
) -> None:
    assert split_overrides(arguments) == (others, overrides)


@given(st.sampled_from(sorted(keys())), st.text(max_size=8))
def test_both_forms_of_an_override_mean_the_same(key: str, value: str) -> None:
    assert split_overrides([f"--{key}", value]) == split_overrides([f"--{key}={value}"])


def test_an_options_values_end_where_an_override_begins() -> None:
    words = [
        "--lengths",
        "run.seed=1",
        "--prompts",
        "10",
        "20",
        "--gen.instances",
        "3",
        "--n",
        "2",
        "run.seed=2",
    ]
    arguments = _parse("bench dispatch", COMMANDS["bench dispatch"], words)
    assert arguments.prompts == [10, 20] and arguments.lengths == Path("run.seed=1")
    assert arguments.overrides == ["gen.instances=3", "run.seed=2"]


@pytest.mark.parametrize(
    "words",
    [
        ["run.seed=1", "--resume", "run.seed=2"],
        ["run.seed=1", "--run.seed", "2", "--resume"],
        ["--resume", "--run.seed", "1", "run.seed=2"],
        ["--run.seed=1", "--resume", "base.toml", "run.seed=2"],
    ],
)
def test_the_later_setting_counts_in_whichever_form(words: list[str]) -> None:
    arguments = _parse("train", COMMANDS["train"], words)
    assert (arguments.overrides, arguments.resume) == (["run.seed=1", "run.seed=2"], "")
    assert arguments.files == [Path(word) for word in words if word == "base.toml"]


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(UserError, match=r"--actor\.optim\.lr has no value"):
        split_overrides(["a.toml", "--actor.optim.lr"])


@pytest.mark.parametrize("order", [0, 1, 2])
def test_files_overrides_and_options_may_stand_in_any_order(
    project: Path, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    (project / "more.toml").write_text("[rollout]\nn = 3\n")
    recorder = install(monkeypatch)
    parts = [
        ["base.toml", "more.toml"],
        ["rollout.temperature=0.5", "--actor.optim.lr", "1e-5"],
        ["--run-dir", "r"],
    ]
    assert main(["train", *(word for part in parts[order:] + parts[:order] for word in part)]) == 0
    (call,) = recorder.calls
    config = call["config"]
    assert (config.rollout.n, config.rollout.temperature, config.actor.optim.lr) == (3, 0.5, 1e-5)
    assert (call["run_dir"], call["resume"], call["fork"]) == (Path("r"), False, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "base.toml"], "There is no command 'trian'; the commands are train, gen"),
        (["pool"], "There is no command 'pool'; the commands are pool list, pool add, pool drain .streamrl"),
        (
            ["pool", "lst", "r"],
            "There is no command 'pool lst'; the commands are pool list, pool add, pool drain",
        ),
        (["train", "base.toml", "--lr", "3"], "does not know --lr; .*did you mean actor.optim.lr"),
        (
            ["train", "base.toml", "lr=3"],
            "command line: lr = 3: there is no such key; did you mean actor.optim.lr",
        ),
        (["train"], "needs a configuration file"),
        (["train", "bass.toml"], "bass.toml does not exist; did you mean base.toml"),
        (["train", "base.toml", "rollout.n=two"], 'rollout.n = "two": expected whole number'),
        (["sft", "--out", "x"], "A configuration file is needed"),
        (["export", "runs/none", "--out", "x"], "Run directory runs/none does not exist"),
        (["export", "runs/none", "--out", "x", "--lr", "3"], "streamrl export does not know --lr"),
    ],
)
def test_what_a_user_gets_wrong_is_one_paragraph_and_exit_code_2(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    import re

    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"streamrl: error: .*{message}.*\n", printed.err)


def test_ctrl_c_and_signals_have_their_exit_codes_and_faults_their_traceback(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, KeyboardInterrupt())
    assert main(["train", "base.toml"]) == 130
    stopped = SimpleNamespace(stopped_by="SIGTERM", version=7, run_dir=Path("runs/demo"))
    install(monkeypatch, stopped)
    assert main(["train", "base.toml"]) == 75
    assert "SIGTERM after step 7; go on with streamrl train --resume runs/demo" in capsys.readouterr().err
    install(monkeypatch, StopRequested("SIGUSR1"))
    assert main(["train", "base.toml"]) == 75
    assert capsys.readouterr().err == "streamrl: stopped by SIGUSR1\n"
    install(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train", "base.toml"])


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("warmstart", ["sft", "base.toml", "--out", "w", "rollout.n=3"], ("config", Path("w"))),
        ("evaluate", ["eval", "base.toml", "--checkpoint", "c", "rollout.n=3"], ("config", Path("c"))),
        ("evaluate", ["eval", "base.toml", "rollout.n=3"], ("config", None)),
        (
            "demo",
            ["demo", "base.toml", "--seed", "4", "--run-dir", "d", "rollout.n=3"],
            ([Path("base.toml")], ["run.seed=4", "rollout.n=3"], Path("d")),
        ),
        ("demo", ["demo"], ([], [], None)),
    ],
)
def test_commands_hand_over_what_they_parsed(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    arguments: list[str],
    expected: tuple[Any, ...],
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*given: Any) -> int:
        calls.append(given)
        return 0

    monkeypatch.setitem(sys.modules, f"streamrl_jax.commands.{module}", SimpleNamespace(run=run))
    assert main(arguments) == 0
    config = load_config([Path("base.toml")], ["rollout.n=3"])
    assert calls == [tuple(config if item == "config" else item for item in expected)]


def test_help_of_a_group_tells_of_its_commands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", "--help"]) == 0
    told = capsys.readouterr().out
    assert "usage: streamrl rank COMMAND" in told
    assert [line.split("  ")[1] for line in told.splitlines() if line.startswith("  ")] == [
        name for name in COMMANDS if name.startswith("rank ")
    ]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"  {name} " in overview and command.summary in overview for name, command in COMMANDS.items())
    assert main([]) == 2
    for name in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert f"usage: streamrl {name}" in capsys.readouterr().out


def test_help_and_dry_runs_import_nothing_heavy(project: Path) -> None:
    code = (
        "import sys\nfrom streamrl_jax.cli import main\n"
        "assert main(['train', 'base.toml', '--dry-run']) == 0 and main(['--help']) == 0\n"
        "heavy = {'jax', 'flax', 'torch', 'vllm', 'grain', 'orbax', 'grpc', 'pyarrow', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "streamrl_jax", "--version"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.startswith("streamrl 0.")


# --- how a run begins -------------------------------------------------------------------------------------


def test_a_new_run_lives_where_its_configuration_says_with_pinned_paths(project: Path) -> None:
    start = plan_start([Path("base.toml")], ["rollout.n=3"])
    assert start.run_dir == project / "runs" / "demo"
    assert start.config.model.path == str(project / "model")
    assert (start.resume, start.fork, start.notes) == (False, None, ())


@pytest.mark.parametrize("how", ["named", "by configuration", "by --run-dir"])
def test_a_resume_takes_the_runs_own_settings_and_the_overrides(project: Path, how: str) -> None:
    run_dir = a_run(project, "rollout.n=5")
    (project / "base.toml").write_text((project / "base.toml").read_text() + "[rollout]\nn = 9\n")
    files = [Path("base.toml")] if how == "by configuration" else []
    resume = str(run_dir) if how == "named" else ""
    start = plan_start(
        files, ["actor.optim.lr=1e-3"], resume, run_dir=run_dir if how == "by --run-dir" else None
    )
    assert start.run_dir == run_dir and start.resume
    assert (start.config.rollout.n, start.config.actor.optim.lr) == (5, 1e-3)
    assert "resumed with changes: actor.optim.lr: 1e-06 → 0.001" in start.notes[0]
    if files:
        assert "keeps its own settings where base.toml now says otherwise" in start.notes[1]
        assert "rollout.n: 5 → 9" in start.notes[1]


def test_an_unchanged_resume_has_nothing_to_tell(project: Path) -> None:
    a_run(project)
    assert plan_start([Path("base.toml")], [], "").notes == ()


def test_a_bare_resume_of_nothing_starts_anew_and_a_named_one_is_refused(project: Path) -> None:
    start = plan_start([Path("base.toml")], [], "")
    assert not start.resume and "it starts anew" in start.notes[0]
    with pytest.raises(UserError, match="Run directory runs/none does not exist"):
        plan_start([], [], "runs/none")
    with pytest.raises(UserError, match="--resume needs a run directory, or a configuration"):
        plan_start([], [], "")


def test_the_settings_after_a_bare_resume_are_no_run_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = a_run(project)
    recorder = install(monkeypatch)
    assert main(["train", "--resume", "base.toml"]) == 0
    assert main(["train", "base.toml", "--resume", "rollout.n=3"]) == 0
    assert [call["run_dir"] for call in recorder.calls] == [run_dir, run_dir]
    assert recorder.calls[1]["config"].rollout.n == 3


def test_a_fork_is_a_new_run_with_the_settings_of_the_other(project: Path) -> None:
    run_dir = a_run(project, "rollout.n=5")
    start = plan_start([], ["actor.optim.lr=1e-3"], fork_from=f"{run_dir}@20")
    assert start.fork == Fork(run_dir, 20) and str(start.fork) == f"{run_dir}@20"
    assert start.run_dir == project / "runs" / "demo-fork" and not start.resume
    assert (start.config.rollout.n, start.config.actor.optim.lr) == (5, 1e-3)
    assert "changes: actor.optim.lr: 1e-06 → 0.001" in start.notes[0]
    assert plan_start([], ["run.name=other"], fork_from=str(run_dir)).run_dir == project / "runs" / "other"
    assert plan_start([], [], fork_from=str(run_dir)).fork == Fork(run_dir, None)


@pytest.mark.parametrize(
    ("resume", "fork_from", "run_dir", "message"),
    [
        ("a", "b", None, "give one of the two"),
        ("runs/a", None, Path("runs/b"), "name two run directories"),
        (None, "runs/none@3", None, "Run directory runs/none does not exist"),
        (None, "model", None, "model is not a run directory"),
    ],
)
def test_starts_that_contradict_themselves_are_refused(
    project: Path, resume: str | None, fork_from: str | None, run_dir: Path | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_start([Path("base.toml")], [], resume, fork_from, run_dir)


# --- dry runs ---------------------------------------------------------------------------------------------


def dry(machine: Machine, *overrides: str) -> str:
    """The text of a dry run; its faults are raised, as the command does."""
    found = dry_run(plan_start([Path("base.toml")], overrides), machine)
    if found.faults:
        raise UserError("; ".join(found.faults))
    return found.text


def test_a_dry_run_prints_a_configuration_that_loads_back(project: Path) -> None:
    start = plan_start([Path("base.toml")], ["rollout.n=3"])
    printed = tomllib.loads(dry_run(start, TWO_CORES).text)
    assert config_from_layers([Layer(COMMAND_LINE, printed)]) == start.config
    assert not start.run_dir.exists()


def test_a_dry_run_tells_devices_processes_and_environment(project: Path) -> None:
    gpus = [
        "gen.instances=4",
        "trainer.mesh.tensor=2",
        "trainer.xla_memory_fraction=0.8",
        "gen.python=python3",
    ]
    text = dry(EIGHT_GPUS, *gpus)
    assert "# trainer     GPU 0,1,2,3\n# instance-0  GPU 4\n" in text
    assert "mesh over 4 trainer devices: data 1, fsdp 2, tensor 2" in text
    assert (
        "# trainer     CUDA_VISIBLE_DEVICES=0,1,2,3 XLA_PYTHON_CLIENT_MEM_FRACTION=0.8 streamrl train" in text
    )
    (last,) = [line for line in text.splitlines() if line.startswith("# instance-3") and "-m" in line]
    assert (
        "CUDA_VISIBLE_DEVICES=7 " in last
        and f"python3 -P -m streamrl_jax.gen.instance --spec {project}/runs/demo/instances/instance-3.json"
        in last
    )
    assert "does not show" not in text
    text = dry(TWO_CORES)
    assert "# trainer     CPU\n# instance-0  cores 0\n# instance-1  cores 1\n" in text
    options = engine_options(plan_start([Path("base.toml")], []).config, "model", "cpu:1", None)
    (last,) = [line for line in text.splitlines() if line.startswith("# instance-1") and "-m" in line]
    for name, value in engine_environment(options).items():
        assert f" {name}={shlex.quote(value)} " in last


def test_a_dry_run_tells_how_large_the_model_is(project: Path) -> None:
    fields = hf_config("Qwen3MoeForCausalLM")
    (project / "model" / "config.json").write_text(json.dumps(fields))
    embedding, norms = 48 * 32, 2 * (2 * 32 + 2 * 8) + 32
    attention, router, expert = 2 * (4 + 2) * 8 * 32, 8 * 32, 3 * 32 * 24
    whole = 2 * embedding + norms + 2 * (attention + router + 8 * expert)
    active = embedding + 2 * (attention + router + 3 * expert)
    text = dry(TWO_CORES, "actor.use_kl_loss=true")
    assert f"# Qwen3MoeForCausalLM: {whole:,} parameters, {active:,} in the products of a token\n" in text
    state = whole * (16 + 16 + 4) / 2**30
    assert f"# training state of policy, critic, reference: {state:.3g} GiB, split over" in text


def test_a_dry_run_away_from_the_gpus_says_which_are_needed(project: Path) -> None:
    text = dry(TWO_CORES, 'gen.devices=["2", "3"]', "trainer.devices=0,1")
    assert "this machine does not show the GPUs 0, 1, 2, 3" in text


@pytest.mark.parametrize("shards", [1, 4])
def test_the_arithmetic_is_that_of_the_batches_the_trainer_builds(shards: int) -> None:
    overrides = [
        "data.train_batch_size=64",
        "rollout.n=4",
        "actor.ppo_max_token_len_per_gpu=4096",
        "gen.instances=2",
    ]
    overrides += ["actor.ppo_mini_batch_size=16", "actor.ppo_epochs=2", "data.max_prompt_length=100"]
    config = load_config([], overrides)
    lines = dict(line.split(maxsplit=1) for line in batch_arithmetic(config, shards).splitlines())
    shape = plan_rl_shape(config, shards)
    assert lines["iteration"] == "64 prompts × 4 answers = 256 samples"
    assert lines["optimizer"] == "8 steps an iteration: 2 epochs × 4 mini-batches of 16 prompts = 64 samples"
    assert lines["run"] == "100 iterations = 25,600 samples, 800 optimizer steps"
    shapes = ", ".join(f"{each.rows:,} × {each.row_len:,}" for each in shape.shapes)
    assert lines["micro-batch"].startswith(
        f"{len(shape.shapes)} compiled shapes, rows × tokens over {shards} data"
    )
    assert (
        f": {shapes}; at most {shape.full.tokens // shards:,} tokens a rank (of 4,096)"
        in lines["micro-batch"]
    )
    assert lines["generation"] == "2 instances × 64 slots = 128 at once, 2 rounds an iteration"
    assert "training waits for the last sample" in lines["mode"]


def test_a_dry_run_tells_all_faults_at_once(project: Path) -> None:
    a_run(project)
    wrong = ["data.train=missing.jsonl", "data.test=task:arithmetics", "reward.function=reward.py:score"]
    wrong += ["gen.python=no-such-python", "security.token_file=none", "trainer.mesh.fsdp=3"]
    with pytest.raises(UserError) as caught:
        dry(EIGHT_GPUS, *wrong)
    for fault in (
        "mesh: data=1, fsdp=3, tensor=1 does not fit 6 trainer devices",
        "data.train = 'missing.jsonl': there is no such file",
        "there is no task 'arithmetics'; did you mean 'arithmetic'",
        f"reward.function = 'reward.py:score': there is no file {project}/reward.py",
        "gen.python = 'no-such-python' is no command",
        "security.token_file = 'none' cannot be read",
        f"run directory {project}/runs/demo exists",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("", {}, "model.path is empty"),
        ("no/such/model", {}, "model.path = 'no/such/model': there is no such directory"),
        ("/no/model", {}, "there is no such directory"),
        (
            "model",
            {"architectures": ["GPT2LMHeadModel"]},
            "config.json: field .architectures. is .*not supported",
        ),
        ("model", {"max_position_embeddings": 31}, "= 32 is more than the model was made for"),
        (".", {}, "no config.json; model.path is not a Hugging Face checkpoint"),
    ],
)
def test_a_model_that_cannot_be_trained_is_named(
    project: Path, path: str, changes: dict[str, Any], message: str
) -> None:
    (project / "model" / "config.json").write_text(json.dumps(hf_config(**changes)))
    with pytest.raises(UserError, match=message):
        dry(TWO_CORES, f"model.path={path}")


def test_a_hub_id_is_left_for_the_run_to_fetch(project: Path) -> None:
    assert 'path = "Qwen/Qwen2.5-0.5B-Instruct"' in dry(TWO_CORES, "model.path=Qwen/Qwen2.5-0.5B-Instruct")


def test_a_dry_run_of_a_resume_finds_the_run_in_place(project: Path) -> None:
    run_dir = a_run(project)
    start: Start = plan_start([], [], str(run_dir))
    assert f"# run directory\n# {run_dir}\n" in dry_run(start, TWO_CORES).text


# --- generation instances ---------------------------------------------------------------------------------


def test_a_runs_instances_get_devices_limits_and_fence(project: Path) -> None:
    overrides = ["gen.max_num_seqs=7", "gen.lookahead=3", "gen.enable_prefix_caching=false", "run.seed=5"]
    config = load_config([Path("base.toml")], ["gen.instances=2", *overrides])
    fence = Fence("demo-1", 2)
    split = DeviceSplit(("cpu:0", "cpu:1"), ())
    access = AccessFiles(token=str(project / "token"))
    (pool,) = pool_templates(config, project / "model", split, access, fence, 40, project)
    first, second = (pool.instance(index, device) for index, device in enumerate(pool.devices))
    assert (first.name, second.name) == ("instance-0", "instance-1")
    assert (first.engine.device, second.engine.device) == ("cpu:0", "cpu:1")
    assert (first.fence, first.lookahead, first.listen) == (fence, 3, "127.0.0.1:0")
    assert (first.access, first.blob_directories) == (access, (str(project),))
    engine = first.engine
    assert (engine.max_num_seqs, engine.max_model_len, engine.seed) == (7, 32, 5)
    assert engine.vocab_limit == 40
    assert not engine.enable_prefix_caching and engine.model == str(project / "model")


def test_gen_becomes_the_instance_that_its_options_describe(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamrl_jax.gen import instance

    became: list[InstanceSpec] = []

    def become(arguments: list[str]) -> None:
        became.append(read_spec(Path(arguments[1])))
        raise SystemExit(0)

    monkeypatch.setattr(instance, "become_instance", become)
    command = ["gen", "base.toml", "--listen", "0.0.0.0:7001", "--token-file", "secret", "--name", "far"]
    with pytest.raises(SystemExit):
        main([*command, "gen.devices=[cpu:1]", "security.insecure=true", "rollout.mask_padded_vocab=false"])
    (spec,) = became
    assert (spec.name, spec.listen) == ("far", "0.0.0.0:7001")
    assert spec.access == AccessFiles(token=str(project / "secret"), insecure=True)
    assert (spec.engine.device, spec.fence) == ("cpu:1", None)


def test_one_instance_takes_the_devices_of_one(project: Path) -> None:
    config = load_config([Path("base.toml")], ["gen.devices=[cpu:0,cpu:1]"])
    with pytest.raises(UserError, match=r"gen\.devices has 2 entries, and streamrl gen is one instance"):
        standalone_spec(config, Path("model"), "127.0.0.1:0", AccessFiles())
    one = load_config([Path("base.toml")], ["rollout.mask_padded_vocab=false"])
    spec = standalone_spec(one, Path("model"), "127.0.0.1:7001", AccessFiles("base.toml"))
    assert spec.name.endswith("-7001") and (spec.engine.device, spec.access.token) == ("", "base.toml")
