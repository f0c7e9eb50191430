"""Generation inside a training loop: fixed shapes, one program."""
