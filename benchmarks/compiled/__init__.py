"""Programs for GPUs and TPUs, compiled without a device: `python -m benchmarks.compiled`."""
