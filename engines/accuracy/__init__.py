"""The parts of `python -m engines.accuracy`. They need the package `polygraphy`."""
