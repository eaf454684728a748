"""The OpenAI-compatible endpoint of one model."""
