"""Random schedules of callers that share holds, with a checker.

Threads and tasks of one process pass entries on, give up waiting, are cancelled, close
generators, detach holds and end without a release. The methods of the backend pause at
random before and after they act. Run it with:

    python -m tests.campaign --seed 1 --rounds 500 --kind threads

The nemesis searches for faults between processes, and this package for faults within
one. plans.py makes a plan from a seed. callers.py executes it and records what each
caller believes. checker.py compares that with what the backend did.
"""
