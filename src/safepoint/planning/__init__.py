"""How often to save: what saving, failing and restoring cost a job, and which interval costs least.

The *work* between two saves excludes the time for which training stands still; the *period* from the beginning of one
save to that of the next includes it. A save that training waits for is *synchronous*; behind one in the *background*
it goes on, and the save counts from the moment it is durable. Failures come at random, at a constant rate.
"""
