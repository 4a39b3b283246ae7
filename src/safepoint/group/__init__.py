"""Ranks talking, with deadlines; never a collective in a background thread.

Nouns: a `Group` is the ranks of one job; rank 0 is the leader. A `Board` is where they leave messages for each other;
a `BoardGroup` is a group over any board. `lead` and `join` are decisions that all ranks take alike.
"""
