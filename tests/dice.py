"""What tests with random requests make them of."""

import random
from typing import Any

_PLAIN = "the old house stood at edge of wood and king said to his daughter that she must go sea ship red new day night"
WORDS = [*_PLAIN.split(), "morning,", "bright", ".", '"', "'", "{}", "12", "\n", "Ünïcode", "中文", "é", "😀"]
WORDS += ["<tool_call>", "</tool_call>", "<think>", "</think>"]
STOPS = ["the", " a", ".", "\n", "e h", "qq", "he sa", "中", "é"]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}


def words(rng: random.Random, count: int) -> str:
    """So many words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))
