"""What PyTorch is, seen from a checkpoint: adapters between live objects and items.

Nouns: an `Item` is one named part of the state; a `Source` gives tensor bytes, a `Target` takes them. `item.py` and
this file import no torch; the other files do.
"""
