"""Weights and heads in files: safetensors, Hugging Face folders, Orbax."""
