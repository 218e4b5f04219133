"""The rooms in which the truth about locks can live."""
