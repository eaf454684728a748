"""Weights and heads in files: safetensors, Hugging Face folders, and the formats of heads."""
