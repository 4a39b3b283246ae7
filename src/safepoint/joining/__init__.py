"""How a start of the job becomes the run: look → claim → look again → select → record.

Nouns: an incarnation is one start of the job, with a number; its holder is the process that beats while it lives.
"""
