"""Bytes under names.

Nouns: a `Storage` keeps objects; an `ObjectWriter` makes one; an `Appender` keeps lines; an `Entry` is what a listing
shows. Nothing in this package knows of checkpoints.
"""
