"""Grammar constraints on generated text."""
