"""Reads and writes weights and heads: safetensors, Hugging Face folders, Orbax."""
