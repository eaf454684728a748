"""The engine: drafters propose, the target decides, one loop for all."""
