"""What a lossy cache costs in quality: measured, and reported."""
