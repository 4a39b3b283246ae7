"""Saving: capture → stage → write → vote → publish, one file per phase; `save.py` reads straight through.

Nouns: a `Snapshot` is the state at one boundary; a `FileForm` says how it will lie on disk, and an `Origin` gives the
bytes, from live memory or from a copy; a ballot says that they are durable; the manifest makes them a checkpoint.
"""
