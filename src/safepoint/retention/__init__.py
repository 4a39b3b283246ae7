"""What may be deleted: a policy decides, the sweep carries it out in two phases.

Nouns: a `Keep` is a policy; a `Decision` says for one generation whether it stays, and why; a tombstone marks a
generation whose data a later sweep deletes.
"""
