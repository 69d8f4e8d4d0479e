"""The HTTP server: what OpenAI's clients speak, over a scheduler of sequences."""
