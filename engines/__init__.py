"""What export and runtime share, and engines for TensorRT."""

from engines.signals import quiet_start

quiet_start()
