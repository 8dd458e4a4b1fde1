"""The tokenizer gives Hugging Face's ids and texts, one BOS in a prompt, and every EOS of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from streamrl_jax.data.tokenizer import Tokenizer
from streamrl_jax.errors import UserError
from streamrl_jax.tasks.smollm import find_gguf, write_tokenizer
from streamrl_jax.tasks.toy_model import CHARACTERS, EOS, PAD, UNKNOWN, write_toy_checkpoint

TEXTS = [
    "What is 17 + 25?",
    "  two  spaces\n\nand lines ",
    "don't  stop… naïve café 12345 🙂",
    "<s>with a BOS of its own",
    "ends</s>",
    "",
]
CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "  1+1= "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "ü 🙂"},
    ],
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
    "endif %}"
)
# Written over several lines, as most are: block trimming, tojson, loop controls, a BOS and a generation
# block.
WITH_BOS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'skip' %}{% continue %}{% endif %}
    {% if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
    {% else %}
[{{ message['role'] }}]{{ message['content'] | tojson }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


def byte_level_bpe() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is the sum of two numbers", "the answer is 12"] * 4, trainer)
    return tokenizer


def write_checkpoint(
    directory: Path,
    tokenizer: tokenizers.Tokenizer,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    files = {
        "tokenizer_config.json": named | (tokenizer_config or {}),
        "config.json": {"model_type": "llama", "vocab_size": 512} | (config or {}),
        "generation_config.json": generation_config,
    }
    for name, content in files.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def with_bos(and_eos: bool = False) -> tokenizers.Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if and_eos else "<s> $A",
        pair="<s> $A <s> $B",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")],
    )
    return tokenizer


CHECKPOINTS: dict[str, tuple[tokenizers.Tokenizer, dict[str, Any]]] = {
    "no bos": (byte_level_bpe(), {}),
    "bos by the post-processor": (with_bos(), {}),
    "bos and eos by the post-processor": (with_bos(and_eos=True), {}),
    # Left-overs of conversions: where there is a tokenizer.json, transformers too goes by its post-processor.
    "bos asked for in vain": (byte_level_bpe(), {"add_bos_token": True, "add_eos_token": True}),
    "bos switched off in vain": (with_bos(), {"add_bos_token": False}),
    "special tokens as objects": (
        with_bos(),
        {
            "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
            "pad_token": "<pad>",
        },
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ids_texts_and_chats_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    tokenizer, tokenizer_config = CHECKPOINTS[name]
    directory = write_checkpoint(
        tmp_path / "m", tokenizer, tokenizer_config=tokenizer_config, template=WITH_BOS
    )
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == ids, text
        assert ours.encode(text).dtype == np.int32
        assert (
            ours.encode(text, special_tokens=False).tolist()
            == theirs(text, add_special_tokens=False)["input_ids"]
        )
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    for chat in CHATS:
        for generation in (True, False):
            rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
            assert ours.render_chat(chat, generation) == rendered
            ids = theirs.apply_chat_template(chat, add_generation_prompt=generation, return_dict=True)[
                "input_ids"
            ]
            assert ours.encode_chat(chat, generation).tolist() == ids
    assert ours.eos_ids[0] == theirs.eos_token_id


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_prompt_has_one_bos_where_the_checkpoint_writes_one_and_no_eos(name: str, tmp_path: Path) -> None:
    tokenizer, tokenizer_config = CHECKPOINTS[name]
    ours = Tokenizer.load(write_checkpoint(tmp_path / "m", tokenizer, tokenizer_config=tokenizer_config))
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    writes_bos = name not in ("no bos", "bos asked for in vain")
    assert ours.bos_id == (bos if writes_bos else None)
    for text in ("hello", "<s>hello"):
        ids = ours.encode_prompt(text).tolist()
        assert ids.count(bos) == (1 if writes_bos or text.startswith("<s>") else 0)
        assert eos not in ids
    assert [ids.tolist() for ids in ours.encode_prompts(TEXTS)] == [
        ours.encode_prompt(t).tolist() for t in TEXTS
    ]


def test_a_template_that_writes_the_bos_gives_one(tmp_path: Path) -> None:
    ours = Tokenizer.load(write_checkpoint(tmp_path / "m", with_bos(), template=WITH_BOS))
    assert ours.encode_chat(CHATS[0]).tolist().count(ours.encode("<s>", special_tokens=False)[0]) == 1


@pytest.mark.parametrize(
    ("generation_config", "config", "eos_token", "expected"),
    [
        ({"eos_token_id": [3, 1]}, {}, "</s>", [1, 3]),  # the tokenizer's own first: examples end with it
        (
            {"eos_token_id": 3},
            {"eos_token_id": 2},
            "</s>",
            [1, 3],
        ),  # the generation config overrules the model's
        (None, {"eos_token_id": 3}, "</s>", [1, 3]),
        ({"do_sample": True}, {"eos_token_id": [3, 2]}, None, [3, 2]),
        (None, {}, "<|im_end|>", [3]),
    ],
)
def test_every_eos_id_is_found(
    generation_config: dict[str, Any] | None,
    config: dict[str, Any],
    eos_token: str | None,
    expected: list[int],
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(
        tmp_path / "m",
        byte_level_bpe(),
        tokenizer_config={"eos_token": eos_token},
        generation_config=generation_config,
        config=config,
    )
    ours = Tokenizer.load(directory)
    assert list(ours.eos_ids) == expected
    assert ours.pad_id == expected[0]


def test_padded_vocabulary_is_told_apart(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    ours = Tokenizer.load(write_checkpoint(tmp_path / "m", backend))
    assert (ours.vocab_size, ours.model_vocab_size) == (backend.get_vocab_size(), 512)


def test_template_of_tokenizer_config_and_its_named_form(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHATML}]
    for number, entry in enumerate((CHATML, named)):
        directory = write_checkpoint(
            tmp_path / str(number), byte_level_bpe(), tokenizer_config={"chat_template": entry}
        )
        ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
        expected = theirs.apply_chat_template(CHATS[1], tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(CHATS[1]) == expected


def test_toy_tokenizer_reads_the_same_everywhere(tmp_path: Path) -> None:
    directory = write_toy_checkpoint(tmp_path / "toy", seed=0)
    ours = Tokenizer.load(directory)
    # AutoTokenizer may take either class, by its version; vllm serve takes AutoTokenizer's.
    for theirs in (AutoTokenizer.from_pretrained(directory), Qwen2Tokenizer.from_pretrained(directory)):
        for text in (CHARACTERS, "37+85=122<eos>", "  it's 4, \n\n ok. ", "12+13=13+12=25"):
            ids = ours.encode(text).tolist()
            assert theirs(text)["input_ids"] == ids
            assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False) == text
        assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_ids[0], ours.pad_id)
        chat = [{"role": "user", "content": "3+4="}]
        assert theirs.apply_chat_template(chat, tokenize=False) == ours.render_chat(chat) == "3+4="


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_toy_checkpoint(tmp_path_factory.mktemp("toy") / "model", seed=0))


@given(text=st.text(alphabet=CHARACTERS, max_size=60))
def test_toy_tokenizer_gives_one_id_a_character_and_loses_nothing(toy: Tokenizer, text: str) -> None:
    assume(not any(special in text for special in (PAD, EOS, UNKNOWN)))  # those are one id each
    ids = toy.encode(text)
    assert len(ids) == len(text)
    assert toy.decode(ids) == text


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "cannot be read as a tokenizer"),
        (
            lambda d: (d / "generation_config.json").write_text("{"),
            "generation_config.json is not valid JSON",
        ),
        (
            lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "2"}'),
            "'eos_token_id' is '2'",
        ),
        (lambda d: (d / "config.json").write_text('{"vocab_size": 10}'), "field 'vocab_size' is 10"),
        (lambda d: (d / "chat_template.jinja").write_text("{% if %}"), "no valid Jinja template"),
        (
            lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "<nope>"}'),
            "field 'eos_token' is '<nope>'",
        ),
        (lambda d: (d / "tokenizer_config.json").write_text("{}"), "no end-of-sequence id"),
    ],
)
def test_a_broken_checkpoint_is_an_error_that_names_the_file(
    breakage: Any, message: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "m", byte_level_bpe())
    breakage(directory)
    with pytest.raises(UserError, match=message.replace("'", ".")) as error:
        Tokenizer.load(directory)
    assert str(directory) in str(error.value)


def test_a_template_that_refuses_and_one_that_is_missing(tmp_path: Path) -> None:
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}x"
    )
    ours = Tokenizer.load(write_checkpoint(tmp_path / "a", byte_level_bpe(), template=refusing))
    assert ours.render_chat(CHATS[0]) == "x"
    with pytest.raises(UserError, match="no system role here"):
        ours.render_chat(CHATS[1])
    with pytest.raises(UserError, match="at least one message"):
        ours.render_chat([])
    without = Tokenizer.load(write_checkpoint(tmp_path / "b", byte_level_bpe()))
    with pytest.raises(UserError, match="no chat template"):
        without.encode_chat(CHATS[0])


def test_smollm_tokenizer_equals_that_of_transformers_and_sets_digits_apart(tmp_path: Path) -> None:
    write_tokenizer(find_gguf(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 49152}')
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "  12  345 + 6", "<|im_start|>user\nhi<|im_end|>\n"]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
    assert [ours.decode([token]) for token in ours.encode("  12")] == ["  ", "1", "2"]
    rendered = theirs.apply_chat_template(CHATS[1], tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(CHATS[1]) == rendered
    assert rendered.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert [ours.decode([token], skip_special_tokens=False) for token in ours.eos_ids] == ["<|im_end|>"]
    assert ours.bos_id is None and ours.unk_id is None
