"""Saving: capture → stage → write → vote → publish, one file per phase; `save.py` reads straight through.

Nouns: a `Snapshot` is the state at one boundary; a `StagedRank` is its copy, laid out as it will lie on disk; a ballot
says that it is durable; the manifest makes it a checkpoint.
"""
