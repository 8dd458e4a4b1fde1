"""Reading answers out of text: numbers, `\\boxed{…}`, GSM8K's `####`, `<answer>` tags. Pure functions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

# A minus belongs to the number unless it stands behind a digit or a bracket, where it subtracts.
_NUMBER: Final = r"(?:(?<![\d)\]])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_NUMBERS: Final = re.compile(_NUMBER)
_LEADING_NUMBER: Final = re.compile(rf"\s*({_NUMBER})")
_WHOLE_NUMBER: Final = re.compile(rf"\s*\$?\s*({_NUMBER})\s*[%.]?\s*")
_FRACTION: Final = re.compile(rf"\s*({_NUMBER})\s*/\s*(\d+)\s*|\s*([-−]?)\\frac\{{(\d+)\}}\{{(\d+)\}}\s*")
_HASHES: Final = re.compile(rf"####\s*\$?\s*({_NUMBER})")
_TAGS: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SPACING: Final = re.compile(r"\\[!,;: ]|\\(?:left|right)(?![a-zA-Z])|\$|\s+")


def parse_number(text: str) -> Fraction | None:
    """Reads a text that is one number: "1,234.50", "-7", "$5", "12%", "3/4", "\\frac{3}{4}". Exact.

    Returns:
        Its value; None if the text is anything else.
    """
    if whole := _WHOLE_NUMBER.fullmatch(text):
        return _value(whole[1])
    if (fraction := _FRACTION.fullmatch(text)) is None:
        return None
    if fraction[1] is not None:
        top, bottom = _value(fraction[1]), int(fraction[2])
    else:
        top, bottom = Fraction(int(fraction[4]) * (-1 if fraction[3] else 1)), int(fraction[5])
    return top / bottom if bottom else None


def last_number(text: str) -> Fraction | None:
    """The last number in a text, or None."""
    found = _NUMBERS.findall(text)
    return _value(found[-1]) if found else None


def leading_number(text: str) -> Fraction | None:
    """The number that a text begins with, spaces aside, or None."""
    found = _LEADING_NUMBER.match(text)
    return _value(found[1]) if found else None


def hashes_number(text: str) -> Fraction | None:
    """The number behind the last `####`, as GSM8K writes its answers, or None."""
    found = _HASHES.findall(text)
    return _value(found[-1]) if found else None


def tagged(text: str) -> str | None:
    """What stands in the last `<answer>…</answer>`, stripped, or None."""
    found = _TAGS.findall(text)
    return found[-1].strip() if found else None


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}`, nested braces included, or None if there is none or it is cut off."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start:position].strip()
    return None


def same_answer(one: str, other: str) -> bool:
    """Whether two short answers are equal: by value if both are numbers, else as text without spacing commands."""
    first, second = parse_number(one), parse_number(other)
    if first is not None and second is not None:
        return first == second
    return _plain(one) == _plain(other)


def _plain(text: str) -> str:
    return _SPACING.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")


def _value(number: str) -> Fraction:
    return Fraction(number.replace(",", "").replace("−", "-"))
