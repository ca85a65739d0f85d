"""squares: squares a few whole numbers; the smallest useful application, made to be copied.

Copy this file to a new name beside it and change it: the file name is the application's name.
`workunit` runs on the server, `compute` on the volunteers' machines; the standard library is there.
"""

about = "Squares whole numbers, ten at a time: the shortest way to see how minigrid works."
min_quorum = 2  # Two volunteers must give the same answer before it counts.
rsc_fpops_est = 3e6  # Python operations; a usual PC does 3e7 in a second.
rsc_fpops_bound = 3e9  # Stopped after so many; starting Python alone may take a second.
rsc_memory_bound = 100e6  # bytes
rsc_disk_bound = 1e6  # bytes


def workunit(i):
    """Number 0 gets the numbers 0 to 9, number 1 gets 10 to 19; None after twenty: no more."""
    return {"input": list(range(10 * i, 10 * i + 10))} if i < 20 else None


def compute(input):
    """What comes in and what is given back may be anything that JSON can hold."""
    return [n * n for n in input]
