"""The parts of `python -m runtime.inspect`."""
