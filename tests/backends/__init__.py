"""The tests of the backends on servers that are no database of Django's: `make test-backends`."""
