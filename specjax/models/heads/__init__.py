"""Drafter heads: small trained networks that read the target and draft."""
