"""The SQL of the engines, their clocks and schemas."""
