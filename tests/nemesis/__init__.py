"""
Many processes over few keys, through the public face, while a seeded schedule of faults seeks who holds; and a checker.

``python -m tests.nemesis --minutes 5 --engine postgresql --seed 1`` runs it; every history is kept. See campaign.py for
what happens, worker.py for what is done under the locks and recorded, and checker.py for what must be true of it.
"""
