"""A small shop that would sell more than it has, were it not for the locks."""
