"""Restoring: select → validate → plan → read → apply, one file per phase; `restore.py` reads straight through.

Nouns: a `Wish` is what the caller asked for; `SavedState` is what a checkpoint says of all items; a `TensorRead` names
the byte ranges that fill a target; a `RestoreReport` says what came of it.
"""
