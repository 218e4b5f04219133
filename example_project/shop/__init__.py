"""The shop's one app: products, sales, and a flash sale."""
