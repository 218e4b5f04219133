"""Leader election: one of many processes leads.

When its lead ends or is lost, or the process stops, the next one is elected.
"""

from dlocks.election.leader import LeaderElection

__all__ = ["LeaderElection"]
