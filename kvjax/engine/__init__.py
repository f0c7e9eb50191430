"""Continuous batching: requests that come and go, in the rows of one cache."""
