"""Reads users' records, documents, conversations and tasks; builds and reads datastores."""
