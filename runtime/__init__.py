"""Runs exported models."""

import os

from engines.signals import quiet_start

# ONNX Runtime's official builds report each session to their makers unless told not to before it is first imported.
# A local model stays local; whoever wants the reports sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
quiet_start()
