"""What kvjax costs, beside Transformers on the same weights: `python -m benchmarks.decode`."""
