"""For authors of back ends and of tests: what any implementation of a seam must hold to.

Nouns: `StorageConformance` (in `safepoint.testing.storage`) is a class of tests for a `Storage`. Nothing here
imports pytest.
"""
