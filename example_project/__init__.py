"""A small shop that would oversell its stock without locks."""
