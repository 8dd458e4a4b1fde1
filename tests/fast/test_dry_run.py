"""A dry run says what is learned by, and finds what a run would refuse before it starts anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl_jax.commands.algorithm_text import algorithm_text
from streamrl_jax.commands.dryrun import dry_run
from streamrl_jax.commands.starts import plan_start
from streamrl_jax.config_hints import hints
from streamrl_jax.config_io import load_config
from streamrl_jax.setup.devices import Machine
from streamrl_jax.tasks.toy_model import ToyShape, write_toy_checkpoint

REPOSITORY = Path(__file__).parents[2]
GRPO = REPOSITORY / "configs" / "demo_grpo.toml"
DECOUPLED = [
    "algorithm.rollout_correction.bypass_mode=false",
    "algorithm.rollout_correction.rollout_is=token",
]


def lines(*overrides: str, layer: str = "") -> dict[str, str]:
    files = [GRPO, *([REPOSITORY / "configs" / "algorithms" / f"{layer}.toml"] if layer else [])]
    text = algorithm_text(load_config(files, overrides))
    return {line[:12].strip(): line[12:] for line in text.splitlines()}


def test_the_algorithm_is_told_part_by_part() -> None:
    assert lines() == {
        "reward": "exact_match",
        "left out": "nothing",
        "advantage": "grpo: the score less the group's mean, over its standard deviation, of 8 answers a prompt",
        "loss": "vanilla: each token's ratio clipped to [0.8, 1.2], dual clip at 3; token-mean",
        "ratio": "against the policy that sampled (bypass_mode = true)",
        "correction": "none",
        "KL": "none",
    }


def test_each_shipped_layer_shows_what_it_changes() -> None:
    dapo = lines(layer="dapo")
    assert dapo["left out"] == (
        "groups of equal scores (others are asked in their place), answers that the length limit cut"
    )
    assert dapo["reward"] == "exact_match, less up to 1 over the last 2 of 8 tokens"
    assert "clipped to [0.8, 1.28]" in dapo["loss"]
    assert lines(layer="gspo")["loss"] == (
        "gspo: the answer's ratio (geometric mean) clipped to [0.97, 1.04]; seq-mean-token-mean"
    )
    assert lines(layer="cispo")["loss"].startswith(
        "cispo: log-probs weighted by the ratio clipped to [0, 1.2]"
    )
    dr_grpo = lines(layer="dr_grpo")
    assert "not divided (Dr. GRPO)" in dr_grpo["advantage"]
    assert dr_grpo["loss"].endswith("seq-mean-token-sum-norm, over 8 tokens")
    assert lines(layer="rloo")["advantage"].startswith("rloo: the score less the mean of the group's others")
    whitened = "; whitened by earlier iterations' statistics"
    assert lines(layer="ppo")["advantage"] == f"gae: from a critic, gamma 1, lambda 1{whitened}"
    assert lines(layer="reinforce_plus_plus")["advantage"].endswith(f"without a baseline{whitened}")
    masked = lines("actor.ppo_epochs=2", layer="masked")
    assert masked["ratio"] == (
        "against the policy at the iteration's start (decoupled, bypass_mode = false); one more forward pass an "
        "iteration"
    )
    assert masked["correction"] == (
        "weight min(rho, 2) of each token; leaves out tokens whose rho is outside [0.5, 2]"
    )


def test_functions_of_ones_own_and_the_kl_are_named() -> None:
    own = lines("algorithm.loss_fn=l.py:f", "algorithm.advantage_fn=a.py:g", "actor.use_kl_loss=true")
    assert own["loss"] == "l.py:f; token-mean" and own["advantage"] == "a.py:g, of 8 answers a prompt"
    assert own["KL"] == "0.001 × k3 in the loss"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], []),
        (["actor.loss_mode=gspo"], ["clips next to nothing", "GSPO's objective is 'seq-mean-token-mean'"]),
        (["actor.use_kl_loss=true", "actor.kl_loss_type=k1"], ["holds nothing back"]),
        (["actor.use_kl_loss=true", "actor.kl_loss_type=k1", "actor.kl_loss_coef=0"], []),
        (["actor.loss_mode=reinforce", "trainer.max_staleness=2"], ["nothing corrects for older samples"]),
        (["actor.loss_mode=reinforce", "trainer.max_staleness=2", *DECOUPLED], []),
        (["actor.loss_mode=reinforce", "actor.ppo_epochs=2"], ["nothing corrects for the updates before"]),
        (["actor.loss_mode=reinforce"], []),
    ],
)
def test_what_is_seldom_meant_is_hinted_at(overrides: list[str], said: list[str]) -> None:
    found = list(hints(load_config([GRPO], overrides)))
    assert len(found) == len(said) and all(part in hint for part, hint in zip(said, found, strict=True))


def test_the_shipped_configurations_need_no_hint() -> None:
    for layer in sorted((REPOSITORY / "configs" / "algorithms").glob("*.toml")):
        assert list(hints(load_config([GRPO, layer], ["trainer.max_staleness=0"]))) == [], layer


# --- what a run would refuse ------------------------------------------------------------------------------------

_FUNCTIONS = """
def loss(inputs): ...
def advantage(): ...
def reward(a, b): ...
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_toy_checkpoint(
        tmp_path / "model", seed=0, shape=ToyShape(embed=32, layers=1, heads=2, kv_heads=1, mlp=48)
    )
    (tmp_path / "own.py").write_text(_FUNCTIONS)
    (tmp_path / "quits.py").write_text("raise SystemExit(0)")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": ""}\n')
    (tmp_path / "base.toml").write_text(
        '[model]\npath = "model"\n[data]\ntrain = "task:arithmetic"\nmax_prompt_length = 8\nmax_response_length = 8\n'
        '[algorithm]\nadv_estimator = "grpo"\n[gen]\ninstances = 1\n'
    )
    return tmp_path


def truncated(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


def edited(**fields: object) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | fields))

    return edit


def a_list(model: Path) -> None:
    (model / "config.json").write_text("[1]")


def untouched(model: Path) -> None:
    del model


@pytest.mark.parametrize(
    ("override", "edit", "message"),
    [
        ("reward.function=exact_mtch", untouched, "no such reward; did you mean 'exact_match'"),
        ("reward.function=own.py:reward", untouched, "takes (a, b), which is no reward's signature"),
        ("reward.kwargs.k=1", untouched, "reward.kwargs.k: exact_match takes no such argument"),
        ("algorithm.loss_fn=3", untouched, "algorithm.loss_fn = '3': the form file.py:function is needed"),
        ("algorithm.loss_fn=own.py:los", untouched, "did you mean 'loss'"),
        (
            "algorithm.loss_fn=own.py:loss",
            untouched,
            "takes (inputs); it must take (inputs, settings), by position",
        ),
        ("algorithm.loss_fn=quits.py:loss", untouched, "raises SystemExit"),
        (
            "algorithm.advantage_fn=own.py:advantage",
            untouched,
            "takes (); it must take (rewards), by position",
        ),
        ("actor.router_aux_loss_coef=0.1", untouched, "Qwen2ForCausalLM has no experts"),
        ("data.train=prompts.jsonl", untouched, "prompts.jsonl, line 2: field 'prompt' is empty"),
        ("rollout.n=8", truncated, "not a whole safetensors file"),
        ("rollout.n=8", edited(vocab_size=4), "model.embed_tokens.weight is"),
        ("rollout.n=8", edited(layer_types=5), "field 'layer_types' is 5"),
        (
            "rollout.n=8",
            edited(rope_theta=float("nan")),
            "field 'rope_theta' is NaN: a positive number is needed",
        ),
        (
            "rollout.n=8",
            edited(rms_norm_eps=float("inf")),
            "field 'rms_norm_eps' is Infinity: a positive number",
        ),
        ("rollout.n=8", a_list, "a JSON object is needed, found list"),
    ],
)
def test_it_finds_what_the_run_would_refuse(
    project: Path, override: str, edit: Callable[[Path], None], message: str
) -> None:
    edit(project / "model")
    found = dry_run(plan_start([Path("base.toml")], [override]), Machine((), (0, 1)))
    assert any(message in fault for fault in found.faults), found.faults
    assert not (project / "runs").exists()


def test_a_critic_that_does_not_fit_is_found(project: Path) -> None:
    write_toy_checkpoint(
        project / "other", seed=0, shape=ToyShape(embed=32, layers=2, heads=2, kv_heads=1, mlp=48)
    )
    critic = ["algorithm.adv_estimator=gae", "model.critic_path=other"]
    (fault,) = dry_run(plan_start([Path("base.toml")], critic), Machine((), (0, 1))).faults
    assert "its architecture differs from the policy's" in fault


def test_a_run_that_would_start_has_no_fault(project: Path) -> None:
    found = dry_run(plan_start([Path("base.toml")], ["actor.loss_mode=gspo"]), Machine((), (0, 1)))
    assert found.faults == ()
    assert "\n# note: actor.loss_mode = 'gspo' with actor.clip_ratio_low = 0.2" in found.text
    assert "\n# advantage   grpo: " in found.text


def test_a_ranker_of_another_tokenizer_is_found(project: Path) -> None:
    given = ["dispatch.policy=skewness", "ranker.path=ranker"]
    (fault,) = dry_run(plan_start([Path("base.toml")], given), Machine((), (0, 1))).faults
    assert "ranker.path" in fault and "has no ranker.json" in fault
    (project / "ranker").mkdir()
    (project / "ranker" / "ranker.json").write_text("{}")
    shape = json.loads((project / "model" / "config.json").read_text())
    config = shape | {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "length"}}
    (project / "ranker" / "config.json").write_text(json.dumps(config))
    assert dry_run(plan_start([Path("base.toml")], given), Machine((), (0, 1))).faults == ()
    (project / "ranker" / "config.json").write_text(json.dumps(config | {"vocab_size": 3}))
    (fault,) = dry_run(plan_start([Path("base.toml")], given), Machine((), (0, 1))).faults
    assert "vocab_size = 3" in fault and "fit a ranker for the tokenizer of model.path" in fault
