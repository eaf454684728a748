"""The OpenAI-compatible endpoint of one model on one device."""
