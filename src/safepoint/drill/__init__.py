"""The failure drill: the user's own command, killed and resumed, compared with itself uninterrupted.

Nouns: a `Kill` says where a start of the command dies; a `Start` is what was seen of one start; a `Rehearsal` is the
uninterrupted start and the chain of killed and resumed ones; a `Judgement` is the verdict on it, with its findings.
Deciding where to kill, comparing and judging are pure; only `process`, `pipes` and `play` touch processes.
"""
