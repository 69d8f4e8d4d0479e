"""GGUF files to ONNX graphs."""

from engines.signals import quiet_start

quiet_start()
