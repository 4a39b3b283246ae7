"""Where in the input: orders, samplers, loaders and cursors whose position is a number.

Nouns: a `GlobalOrder` gives the sample index at each position of an epoch; a `ResumableSampler` cuts it into batches;
a `ResumableLoader` loads them through torch's `DataLoader`; a `Cursor` holds an offset in an input that is ordered
elsewhere, with a `Replay` policy. A batch is *handed out* when the loop receives it and *committed* when its update is
complete; what a checkpoint stores is the committed position, and a `DatasetIdentity` that says in which data set.
"""

from safepoint.data.cursor import Cursor, Replay, may_repeat, may_skip
from safepoint.data.dataset import DatasetIdentity
from safepoint.data.loader import ResumableLoader
from safepoint.data.order import GlobalOrder, share_of_batch
from safepoint.data.sampler import ResumableSampler
from safepoint.data.streams import sample_generator
from safepoint.data.workers import WorkerStart

__all__ = [
    "Cursor",
    "DatasetIdentity",
    "GlobalOrder",
    "Replay",
    "ResumableLoader",
    "ResumableSampler",
    "WorkerStart",
    "may_repeat",
    "may_skip",
    "sample_generator",
    "share_of_batch",
]
