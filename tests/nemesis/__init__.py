"""A fault-injection harness for locks, with a checker.

Many processes compete for few keys through the public API, while a seeded schedule of
faults aims at the holders. Run it with:

    python -m tests.nemesis --minutes 5 --engine postgresql --seed 1

Every history is kept. campaign.py injects the faults. worker.py works under the locks
and records the history. checker.py checks the promises against it.
"""
