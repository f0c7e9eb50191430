"""An engine behind HTTP, as OpenAI's clients ask for it."""
