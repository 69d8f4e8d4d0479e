"""The parts of `python -m runtime.profile`."""
