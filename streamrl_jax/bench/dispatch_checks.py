"""What `streamrl bench dispatch` refuses before any instance starts: options, files, lengths out of reach."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl_jax.bench.dispatch_draws import Material
from streamrl_jax.bench.dispatch_rounds import FEWEST_ROUNDS, prompts_of
from streamrl_jax.config_ranker import RankerSection
from streamrl_jax.errors import UserError
from streamrl_jax.files import check_replaceable

if TYPE_CHECKING:
    from streamrl_jax.config import Config


def check_options(arguments: Namespace) -> None:
    """Refuses options that make no sense, whatever the files hold.

    Raises:
        UserError: Names the option, its value and the remedy.
    """
    for option, values in (
        ("--prompts", arguments.prompts),
        ("--n", [arguments.n]),
        ("--pools", arguments.pools),
    ):
        if (least := min(values, default=1)) < 1:
            raise UserError(f"{option} {least}: 1 is the least")
    if arguments.rounds < FEWEST_ROUNDS:
        raise UserError(f"--rounds {arguments.rounds}: an interval needs {FEWEST_ROUNDS} or more")
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: give 0 or more")
    if not arguments.limit_s >= 0:
        raise UserError(f"--limit-s {arguments.limit_s}: give seconds, 0 or more")
    if not arguments.files:
        raise UserError("A configuration file is needed: it says which model, and how many instances.")
    if arguments.json is not None:
        check_replaceable(arguments.json, "--json")
    if arguments.history is not None and arguments.history.resolve() == arguments.lengths.resolve():
        raise UserError(
            f"--history {arguments.history} is the file of --lengths: it would know the very answers that are forced; "
            "collect another sampling (streamrl rank collect run.seed=...)"
        )


def check_enough(material: Material, prompts: int, n: int) -> None:
    """Refuses rounds for which too little was recorded, whichever prompts they draw.

    Args:
        material: What they are drawn from.
        prompts: Of a round.
        n: Answers to each.

    Raises:
        UserError: There are fewer prompts, or fewer answers to one of them.
    """
    rows = material.rows
    if prompts > len(rows):
        raise UserError(
            f"--prompts {prompts} is more than the {len(rows)} prompts of --lengths; give fewer, or collect more "
            "(streamrl rank collect)"
        )
    fewest = min(rows, key=lambda row: len(row.lengths))
    if n > len(fewest.lengths):
        raise UserError(
            f"--n {n} is more than the {len(fewest.lengths)} answers that --lengths has to prompt {fewest.prompt_id}; "
            "give fewer, or collect more (streamrl rank collect --n)"
        )


def check_answerable(cfg: Config, material: Material, lengths: Path) -> None:
    """Refuses prompts and lengths that the configured instances do not take.

    Args:
        cfg: Names the checkpoint and its limits.
        material: What is asked.
        lengths: Its file, for the message.

    Raises:
        UserError: A token is not in the checkpoint's vocabulary, or an answer does not fit the context.
    """
    from streamrl_jax.setup.inputs import model_directory
    from streamrl_jax.train.hf_directory import read_arch

    config = model_directory(cfg.model.path, "model.path")
    known, most = read_arch(config).vocab_size, cfg.gen.max_model_len or cfg.longest_sample
    for row in material.rows:
        if (largest := int(row.token_ids.max())) >= known:
            raise UserError(
                f"{lengths}: prompt {row.prompt_id} has the token {largest}, and vocab_size = {known} in "
                f"{config / 'config.json'}; collect lengths with the checkpoint of model.path"
            )
        if (tokens := len(row.token_ids) + max(row.lengths)) > most:
            raise UserError(
                f"{lengths}: an answer to prompt {row.prompt_id} makes {tokens} tokens with it, and gen.max_model_len "
                f"allows {most}; raise it (0: data.max_prompt_length + data.max_response_length)"
            )


def check_ranker(directory: Path, material: Material) -> None:
    """Refuses a ranker that cannot predict these prompts.

    Raises:
        UserError: It is none, or does not know a token of the prompts.
    """
    from streamrl_jax.ranker.restore import check_given

    check_given(RankerSection(path=str(directory)), prompts_of(material.rows))
