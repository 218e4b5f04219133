"""The SQL of the engines, their clocks, character sets and schemas."""
