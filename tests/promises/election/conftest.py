from tests.promises.election.campaigns import elections, heard

__all__ = ["elections", "heard"]
