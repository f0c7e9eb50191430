"""Prompts to text: requests, sessions, compiled programs, results."""
