"""A chat in a terminal: what `runtime.chat` puts together."""
