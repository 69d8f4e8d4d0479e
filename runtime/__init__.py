"""Runs exported models."""

import os

# ONNX Runtime's official builds report each session to their makers unless told not to before it is first imported.
# A local model stays local; whoever wants the reports sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
