"""Things going wrong, played from outside: wrappers around the seams, never hooks within the product.

Nouns: a `Fault` says what goes wrong and where; a `FaultScript` is a seeded, printable list of them; a `FaultyStorage`
plays a script over any storage; a `SimulatedDisk` knows what a power cut may leave of it.
"""
