"""What lies on disk: names, records and their bytes. Pure: no input or output, no torch, no clock.

Nouns: a `Manifest` commits a generation; an `Index` lists a rank's chunks and plain values; a `Ballot` is a rank's
vote; run, incarnation, resumed and tombstone records tell the lineage. Normative text: docs/spec/v1.md.
"""
