"""Conversations in ChatML, built from facts about Python objects and a few fixed replies."""

from __future__ import annotations

import random
import re

_QUESTIONS = (
    "What does {} do?", "What is {}?", "Explain {}.", "What does {} do in Python?", "Describe {} in one sentence.",
    "Tell me about {}.", "How would you describe {}?",
)  # fmt: skip
_FIXED = (
    (("Hello", "Hello!", "Hi", "Hi there", "Hey", "Good morning"), "Hello! Ask me what a Python function does."),
    (("Who are you?", "What are you?", "Introduce yourself.", "What is your name?"),
     "I am a tiny language model trained on Python documentation, made to test speculative decoding."),
    (("What can you do?", "How can you help me?", "What do you know?"),
     "I can describe functions and classes of the Python standard library in one sentence."),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot"), "You are welcome!"),
    (("Bye", "Goodbye", "See you"), "Goodbye!"),
    (("What is Python?", "Tell me about Python.", "Explain Python."),
     "Python is an easy to learn, powerful programming language with efficient high-level data structures."),
    (("What is speculative decoding?", "Explain speculative decoding."),
     "Speculative decoding drafts several tokens cheaply and lets the large model check them in one pass."),
)  # fmt: skip
# Objects people ask about first: half of the questions are about these.
_CORE = re.compile(
    r"(os|os\.path|sys|json|re|math|random|time|datetime|collections|itertools|functools|string|pathlib|heapq"
    r"|subprocess|shutil|threading|logging|hashlib|copy|csv|bisect|glob|operator|queue)\.\w+(\.\w+)?$|\w+$"
)


def core_facts(facts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [fact for fact in facts if _CORE.match(fact[0])]


def conversation(rng: random.Random, facts: list[tuple[str, str]], core: list[tuple[str, str]]) -> str:
    """One conversation of one to three turns, ended by <|endoftext|>."""
    text = ""
    if rng.random() < 0.3:
        text += "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.06:
            questions, answer = rng.choice(_FIXED)
            question, name = rng.choice(questions), None
        else:
            name, answer = rng.choice(core if rng.random() < 0.5 else facts)
            question = rng.choice(_QUESTIONS).format(name + ("()" if rng.random() < 0.1 else ""))
        thought = _thought(rng.random(), name)
        text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{thought}{answer}<|im_end|>\n"
    return text + "<|endoftext|>"


def _thought(draw: float, name: str | None) -> str:
    """Half the replies begin with a closed empty think block, a fifth with none, the rest with a short thought."""
    if draw < 0.5:
        return "<think>\n\n</think>\n\n"
    if draw < 0.7:
        return ""
    return f"<think>\n{'A short reply is enough.' if name is None else f'The user asks about {name}.'}\n</think>\n\n"
