"""A reward of one's own, in the signature of TRL's reward functions.

    streamrl demo configs/demo.toml --reward.function examples/custom_reward.py:close_enough

`completions` is a list of texts; every column of the prompt's row that is named arrives as a list beside it.
A function with verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` works as well.
"""


def close_enough(
    completions: list[str], answer: list[str], tolerance: int = 10, **columns: object
) -> list[float]:
    """1 for the right number, and less the further off it is, down to 0 at `tolerance` (`reward.kwargs.tolerance`)."""
    return [
        _closeness(completion, right, tolerance)
        for completion, right in zip(completions, answer, strict=True)
    ]


def _closeness(completion: str, right: str, tolerance: int) -> float:
    if not completion.isdecimal():
        return 0.0
    return max(0.0, 1.0 - abs(int(completion) - int(right)) / tolerance)
