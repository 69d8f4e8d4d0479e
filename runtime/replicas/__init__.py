"""The server on several GPUs or machines: what `runtime.serve_ray` puts together, over Ray Serve."""
