"""An HTTP server for an engine, compatible with OpenAI's API."""
