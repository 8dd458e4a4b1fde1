"""Prompts: what is drawn is a pure function of the iteration, nothing is cut, and every fault names file and
line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_jax.config import Config, DataSection
from streamrl_jax.data import Order, PromptSet, load_prompts
from streamrl_jax.data.sft import load_examples
from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.tasks.toy_model import write_toy_checkpoint
from streamrl_jax.types import Prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_toy_checkpoint(tmp_path_factory.mktemp("toy") / "model", seed=0))


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def numbered(count: int, batch_size: int, seed: int | None) -> PromptSet:
    prompts = tuple(Prompt(str(row), np.array([row], np.int32), {"prompt": str(row)}) for row in range(count))
    return PromptSet("numbers", prompts, Order(count, seed), batch_size)


def drawn_rows(prompts: PromptSet, i: int) -> list[int]:
    return [int(prompt.token_ids[0]) for prompt in prompts.iteration(i)]


# ------------------------------------------------------------------ the order


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 12), batch=st.integers(1, 30), seed=st.integers(-5, 2**40))
def test_iterations_walk_through_one_permutation_after_another(count: int, batch: int, seed: int) -> None:
    iterations = 3 * count // batch + 3
    walk = [row for i in range(iterations) for row in drawn_rows(numbered(count, batch, seed), i)]
    for start in range(0, len(walk) - count + 1, count):
        assert sorted(walk[start : start + count]) == list(range(count))


def test_an_iteration_depends_on_its_number_and_the_seed_alone() -> None:
    def draw(seed: int, order: list[int]) -> dict[int, list[int]]:
        prompts = numbered(10, 4, seed)
        return {i: drawn_rows(prompts, i) for i in order}

    forwards, backwards = draw(3, list(range(8))), draw(3, list(range(7, -1, -1)))
    assert forwards == backwards
    assert draw(4, list(range(8))) != forwards
    # Another process, another hash seed: the same.
    script = (
        "from tests.fast.test_data import numbered, drawn_rows\n"
        "print([drawn_rows(numbered(10, 4, 3), i) for i in range(8)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(other.stdout) == [forwards[i] for i in range(8)]


def test_epochs_differ_and_without_a_seed_the_source_keeps_its_order() -> None:
    shuffled = numbered(50, 50, seed=0)
    assert drawn_rows(shuffled, 0) != drawn_rows(shuffled, 1)
    plain = numbered(5, 3, seed=None)
    assert [drawn_rows(plain, i) for i in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (1, 7), (2, 3), (5, 4), (5, 20)])
def test_prompt_ids_are_unique_within_an_iteration(count: int, batch: int) -> None:
    prompts = numbered(count, batch, seed=1)
    for i in range(3):
        ids = [prompt.prompt_id for prompt in prompts.iteration(i)]
        assert len(set(ids)) == batch
        rows = drawn_rows(prompts, i)
        assert Counter(int(prompt_id.split(".")[0]) for prompt_id in ids) == Counter(rows)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 30),
    batch=st.integers(1, 12),
    seed=st.none() | st.integers(-5, 2**40),
    i=st.integers(0, 20),
)
def test_further_prompts_are_all_the_others_once(count: int, batch: int, seed: int | None, i: int) -> None:
    """So no prompt comes twice in an iteration, as long as there are enough."""
    prompts = numbered(count, batch, seed)
    own, further = drawn_rows(prompts, i), [int(p.token_ids[0]) for p in prompts.further(i)]
    assert sorted(set(own) | set(further)) == list(range(count))
    assert len(further) == count - len(set(own))
    again = numbered(count, batch, seed)
    next(again.further(i + 1), None)  # nothing but the number counts, not what was drawn before
    assert [int(p.token_ids[0]) for p in again.further(i)] == further
    assert drawn_rows(again, i + 1) == drawn_rows(prompts, i + 1)


def test_further_prompts_differ_from_iteration_to_iteration_and_go_on_where_nothing_is_shuffled() -> None:
    def further(prompts: PromptSet, i: int) -> list[int]:
        return [int(p.token_ids[0]) for p in prompts.further(i)]

    shuffled = numbered(200, 4, seed=0)
    orders = {tuple(further(shuffled, i)[:20]) for i in range(8)}
    assert len(orders) == 8
    assert further(numbered(200, 4, seed=1), 0) != further(shuffled, 0)
    assert further(numbered(7, 3, seed=None), 1) == [6, 0, 1, 2]


# ------------------------------------------------------------------ sources


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1, "extra_info": {"n": n}} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = [json.dumps(row) for row in rows]
    sources = [
        write_jsonl(tmp_path / "a.jsonl", [*lines[:2], "", "  ", *lines[2:]]),
        str(tmp_path / "a.parquet"),
    ]
    sets = [load_prompts(DataSection(train=source), tokenizer, "train", seed=0) for source in sources]
    for prompts in sets:
        assert [prompt.prompt_id for prompt in prompts.all()] == ["0", "1", "2", "3", "4"]
        assert [dict(prompt.columns) for prompt in prompts.all()] == rows
        for prompt, row in zip(prompts.all(), rows, strict=True):
            assert prompt.token_ids.tolist() == tokenizer.encode(row["prompt"]).tolist()
    assert sets[0].digest == sets[1].digest
    changed = write_jsonl(tmp_path / "b.jsonl", [rows[0] | {"answer": 7}, *rows[1:]])
    assert load_prompts(DataSection(train=changed), tokenizer, "train", seed=0).digest != sets[0].digest


def test_the_digest_takes_any_row(tokenizer: Tokenizer) -> None:
    def digest(columns: dict[Any, Any]) -> str:
        prompt = Prompt("0", np.array([1], np.int32), columns)
        return PromptSet("x", (prompt,), Order(1, 0), 1).digest

    assert digest({"a": {(1, 2): {"y", "x"}}, "b": None}) == digest({"b": None, "a": {(1, 2): {"x", "y"}}})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})


def test_a_task_gives_training_and_held_out_rows(tokenizer: Tokenizer) -> None:
    data = DataSection(train="task:arithmetic", test="task:arithmetic")
    train, test = (load_prompts(data, tokenizer, which, seed=0) for which in ("train", "test"))
    texts = [{tokenizer.decode(prompt.token_ids) for prompt in prompts.all()} for prompts in (train, test)]
    assert texts[0] and texts[1] and not texts[0] & texts[1]
    assert drawn_rows(test, 0) == [int(prompt.token_ids[0]) for prompt in test.all()[:32]]  # never shuffled


def test_prompts_are_read_before_jax_is_imported(tmp_path: Path) -> None:
    """The environment of JAX's devices is set after the prompts are read."""
    model = write_toy_checkpoint(tmp_path / "toy", seed=0)
    script = f"""
import sys
from streamrl_jax.config import Config, DataSection, RewardSection
from streamrl_jax.data import load_prompts
from streamrl_jax.rewards import load_reward
from streamrl_jax.data.tokenizer import Tokenizer
tokenizer = Tokenizer.load({str(model)!r})
load_prompts(DataSection(train="task:arithmetic"), tokenizer, "train", seed=0)
load_reward(RewardSection())
print(sorted({{"jax", "torch", "transformers", "vllm"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------ chats


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_toy_checkpoint(tmp_path_factory.mktemp("chat") / "model", seed=0)
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    return Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("prompt", "system", "expected"),
    [
        ("1+1=", "", "[user]1+1=>"),
        ("1+1=", "be brief", "[system]be brief[user]1+1=>"),
        ([{"role": "user", "content": "1+1="}], "be brief", "[system]be brief[user]1+1=>"),
        (
            [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}],
            "other",
            "[system]own[user]x>",
        ),
    ],
)
def test_chat_template(
    prompt: Any, system: str, expected: str, tmp_path: Path, chat_tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"question": prompt}])
    data = DataSection(train=source, prompt_key="question", apply_chat_template=True, system_prompt=system)
    (read,) = load_prompts(data, chat_tokenizer, "train", seed=0).all()
    assert chat_tokenizer.decode(read.token_ids) == expected
    assert read.columns["prompt"] == prompt  # under the name that reward functions know


# ------------------------------------------------------------------ limits and faults


def test_prompts_over_the_limit_stop_the_run_or_are_dropped_and_counted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [{"prompt": "1" * length} for length in (4, 9, 5, 12)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 2: the prompt has 9 tokens.*= 5 \(2 of 4.*12 tokens"
    ):
        load_prompts(DataSection(train=source, max_prompt_length=5), tokenizer, "train", seed=0)
    dropping = DataSection(train=source, max_prompt_length=5, overlong_prompts="drop")
    kept = load_prompts(dropping, tokenizer, "train", seed=0)
    assert kept.dropped == 2
    assert [(prompt.prompt_id, len(prompt.token_ids)) for prompt in kept.all()] == [("0", 4), ("2", 5)]
    with pytest.raises(UserError, match=r"all 4 prompts.*none is left"):
        load_prompts(dropping.model_copy(update={"max_prompt_length": 3}), tokenizer, "train", seed=0)


GOOD = '{"prompt": "1+1="}'


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (f'{GOOD}\n{{"prompt": "1\n', {}, r"p\.jsonl, line 2: not valid JSON"),
        (f"{GOOD}\n\n[1]\n", {}, r"p\.jsonl, line 3: a JSON object is needed, found list"),
        (f'{GOOD}\n{{"promt": "x"}}\n', {}, r"line 2: field 'prompt' is missing.*did you mean 'promt'"),
        ('{"prompt": 7}\n', {}, r"line 1: field 'prompt' is int 7; a string is needed"),
        ('{"prompt": []}\n', {}, r"line 1: field 'prompt' is list"),
        ('{"prompt": [{"role": "user"}]}\n', {}, r"line 1: field 'prompt' is list"),
        ('{"prompt": [{"role": "user", "content": "x"}]}\n', {}, r"line 1: .*apply_chat_template = false"),
        ('{"prompt": ""}\n', {}, r"line 1: field 'prompt' is empty"),
        ('{"prompt": "é"}\n', {}, r"line 1: field 'prompt' has characters that the vocabulary"),
        ("\n", {}, r"data\.train = .*p\.jsonl' holds no row"),
        (GOOD, {"prompt_key": "question"}, r"line 1: field 'question' is missing"),
        (GOOD, {"system_prompt": "x"}, r"data\.system_prompt is set, but data\.apply_chat_template = false"),
        (GOOD, {"train": ""}, r"data\.train is empty"),
        (GOOD, {"train": "nowhere.jsonl"}, r"data\.train = 'nowhere\.jsonl': there is no such file"),
        (
            GOOD,
            {"train": "prompts.csv"},
            r"data\.train = 'prompts\.csv': a file that ends in \.jsonl or \.parquet",
        ),
        (GOOD, {"train": "task:arithmetik"}, r"there is no task 'arithmetik'; did you mean 'arithmetic'"),
    ],
)
def test_a_fault_names_file_line_and_field(
    content: str, settings: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    data = DataSection.model_validate({"train": str(tmp_path / "p.jsonl")} | settings)
    with pytest.raises(UserError, match=message):
        load_prompts(data, tokenizer, "train", seed=0)


def test_bytes_that_are_no_text_and_a_torn_parquet_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: not UTF-8"):
        load_prompts(DataSection(train=str(tmp_path / "a.jsonl")), tokenizer, "train", seed=0)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as parquet"):
        load_prompts(DataSection(train=str(tmp_path / "a.parquet")), tokenizer, "train", seed=0)


# ------------------------------------------------------------------ examples for the warm start


def sft_config(**sections: dict[str, Any]) -> Config:
    sft = {"batch_size": 4} | sections.pop("sft", {})
    return Config.model_validate(
        Config(data=DataSection(train="x")).model_dump() | {"sft": Config().sft.model_dump() | sft}
    )


def test_examples_of_a_file_are_read_through_in_permutations_and_end_with_the_eos(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{n}:", "solution": f"{n}{n}"} for n in range(6)])
    examples = load_examples(sft_config(sft={"data": source, "answer_key": "solution"}), tokenizer)
    seen = [example for step in range(3) for example in examples.batch(step)]
    for epoch in (seen[:6], seen[6:]):
        assert sorted(tokenizer.decode(example.prompt_ids) for example in epoch) == [
            f"{n}:" for n in range(6)
        ]
    for example in seen:
        n = tokenizer.decode(example.prompt_ids)[0]
        assert example.answer_ids.tolist() == [*tokenizer.encode(n + n).tolist(), tokenizer.eos_ids[0]]
    assert examples.stop_set == ()


def test_examples_of_a_task_are_redrawn_at_each_step(tokenizer: Tokenizer) -> None:
    cfg = sft_config(sft={"data": "task:arithmetic", "stop_accuracy": 0.99})
    examples = load_examples(cfg, tokenizer)

    def texts(step: int) -> list[str]:
        return [tokenizer.decode([*e.prompt_ids, *e.answer_ids]) for e in examples.batch(step)]

    assert texts(5) == texts(5) != texts(6)
    assert len(texts(0)) == 4
    assert all(tokenizer.decode(e.prompt_ids).endswith("=") for e in examples.stop_set)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{"prompt": "1", "answer": 2}],
            {},
            r"line 1: field 'answer' is 2; the answer to imitate must be a string",
        ),
        ([{"prompt": "1"}], {}, r"line 1: field 'answer' is missing"),
        (
            [{"prompt": "1", "answer": "2" * 1024}],
            {},
            r"line 1: prompt and answer have 1 \+ 1025 tokens, more than",
        ),
        ([{"prompt": "1", "answer": "É"}], {}, r"line 1: field 'answer' has characters"),
        (
            [{"prompt": "1", "answer": "2"}],
            {"stop_accuracy": 0.9},
            r"sft\.stop_accuracy = 0\.9.*has no stop set",
        ),
        ([{"prompt": "1", "answer": "2"}], {"data": ""}, r"sft\.data is empty"),
    ],
)
def test_a_fault_in_an_example_is_named(
    rows: list[Any], settings: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=message):
        load_examples(sft_config(sft={"data": source} | settings), tokenizer)
