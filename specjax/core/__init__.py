"""Errors, files, text and pytrees that every other package uses; imports none of them."""
