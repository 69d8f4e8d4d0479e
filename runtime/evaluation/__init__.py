"""The parts of `python -m runtime.eval`."""
