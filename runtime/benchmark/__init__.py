"""The parts of `python -m runtime.bench`."""
