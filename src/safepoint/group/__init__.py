"""Ranks talking, with deadlines; never a collective in a background thread.

Nouns: a `Group` is the ranks of one job; rank 0 is the leader.
"""
