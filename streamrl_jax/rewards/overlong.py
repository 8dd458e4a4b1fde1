"""DAPO's soft punishment of answers that come near the length limit."""

from __future__ import annotations


def overlong_penalty(length: int, limit: int, buffer_len: int, factor: float) -> float:
    """What an answer's length adds to its score (DAPO, arXiv 2503.14476, eq. 13, times ``factor``).

    With ``over = length - (limit - buffer_len)``, the tokens of the answer that lie in the buffer:
    ``0`` where ``over <= 0``, ``-factor * over / buffer_len`` up to the limit, ``-factor`` at and beyond it. So the
    score sinks before the limit cuts the answer off, and an answer learns to end in time.

    Args:
        length: Tokens of the answer, its stop token included.
        limit: Tokens that an answer may have at most (``data.max_response_length``).
        buffer_len: Tokens before the limit in which the punishment grows (``reward.overlong_buffer.len``); 0: none.
        factor: Its full size (``reward.overlong_buffer.penalty_factor``).

    Returns:
        From ``-factor`` to 0, to be added to the score.
    """
    over = length - (limit - buffer_len)
    if not buffer_len or over <= 0:
        return 0.0
    return -factor * min(over, buffer_len) / buffer_len
