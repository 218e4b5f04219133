"""The differences between the database engines and their drivers."""
