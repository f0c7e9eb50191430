"""What is done with a cache beside filling it: rows, rewind, growth, conversion, migration."""
