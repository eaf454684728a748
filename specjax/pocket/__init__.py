"""The embedded default: a small Llama that copies and predicts code, with all that made it."""
