"""Reads what users bring: records, documents, conversations, tasks, datastores."""
