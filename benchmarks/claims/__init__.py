"""The papers' claims, compared with a finished benchmark: `python -m benchmarks.claims FOLDER`."""
