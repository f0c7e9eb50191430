"""Text from prompts: requests, programs, sessions, sampling, batches."""
